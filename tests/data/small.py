"""A catalogue entry of two small files, available at an address and in a package."""

from __future__ import annotations

import gzip
import hashlib
import io
import zipfile

from clipwise.data.catalog import Entry, File, Form, Supply
from clipwise.data.origins import Address, PyPI

FIRST, SECOND = b"first " * 400, b"second " * 300
BASE = "https://example.org/small"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel() -> bytes:
    """An archive that has both files, the second one as gz."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("package/first", FIRST)
        archive.writestr("package/second.gz", gzip.compress(SECOND, mtime=0))
    return stream.getvalue()


WHEEL = wheel()
FILES = (File("first", sha(FIRST)), File("second", sha(SECOND)))
AT_ADDRESS = Supply(
    (
        Address(f"{BASE}/first", sha(FIRST), len(FIRST)),
        Address(f"{BASE}/second.gz", sha(gzip.compress(SECOND, mtime=0)), 60),
    )
)
IN_PACKAGE = Supply(
    (PyPI("small==1", "small-1-py3-none-any.whl", sha(WHEEL), len(WHEEL)),),
    {"first": "package/first", "second": "package/second.gz"},
)

WHEEL_NAME = IN_PACKAGE.origins[0].filename


def entry(*sources: Supply, name: str = "small") -> Entry:
    return Entry(name, "Small", "data", "CC0", (Form(FILES, sources or (AT_ADDRESS, IN_PACKAGE), "In small."),))
