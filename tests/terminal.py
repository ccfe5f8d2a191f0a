"""A stream that says it is a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """What was written is in `getvalue()`; what is on the screen, in `screen`."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The lines that a person sees in the end."""
        return [line.split("\r\033[K")[-1] for line in self.getvalue().split("\n")]
