"""The values of a plan as JSON, and back. Only clipwise's own classes are ever made from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from clipwise import clipping, mechanisms
from clipwise.accounting import Steps
from clipwise.correlation import CORRELATIONS
from clipwise.errors import InvalidPlan
from clipwise.sampling import SAMPLINGS, arguments, made_from

__all__ = ["decode", "encode", "keys"]

_SAMPLINGS = tuple(SAMPLINGS.values())

_CLIPS = tuple(
    getattr(clipping, name)
    for name in (
        *("Abadi", "Automatic", "BatchClip", "Flat", "Global", "GlobalScaled", "Groupwise", "Layerwise", "MixUp"),
        *("NoClip", "Normalize", "Unclipped"),
    )
)
_MECHANISMS = tuple(getattr(mechanisms, name) for name in mechanisms.__all__ if name not in ("Mechanism", "Repeated"))
_VALUES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (*_SAMPLINGS, *_CLIPS, *_MECHANISMS, Steps, *CORRELATIONS.values())
}


def keys(record: object) -> object:
    """The keys of a record for a message; what is not a record, as it is."""
    return sorted(map(str, record)) if isinstance(record, Mapping) else record


def encode(value: Any) -> Any:
    """A frozen value as {"kind": class name, fields}; a mapping as {"kind": "mapping", "items": pairs, order kept}.

    >>> encode(clipping.Abadi(1.0))
    {'kind': 'Abadi', 'R': 1.0}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"kind": "mapping", "items": [[key, encode(item)] for key, item in value.items()]}
    if not dataclasses.is_dataclass(value):
        raise InvalidPlan(f"{value!r} cannot be written down: make it a frozen dataclass of numbers and strings.")
    cls = type(value)
    known = _VALUES.get(cls.__name__) is cls
    kind = cls.__name__ if known else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, _SAMPLINGS):
        return {"kind": kind, **arguments(value)}
    return {"kind": kind, **{f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}}


def decode(value: Any) -> Any:
    """The value that `encode` wrote; unknown kinds, missing and extra fields are refused.

    >>> decode(encode(clipping.Abadi(1.0)))
    Abadi(R=1.0)
    """
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if kind == "mapping":
        return _mapping(value.get("items"))
    cls = _VALUES.get(str(kind))
    if cls is None:
        # Importing whatever a file names would let the file choose the code that runs.
        raise InvalidPlan(f"{kind!r} is not one of clipwise's own values; give the plan itself instead (plan=...).")
    if cls in _SAMPLINGS:
        return made_from(cls, {name: item for name, item in value.items() if name != "kind"})
    names = {f.name for f in dataclasses.fields(cls)}
    if set(value) - {"kind"} != names:
        raise InvalidPlan(f"{kind} has the fields {sorted(names)}, got {keys(value)}.")
    return cls(**{name: decode(value[name]) for name in names})


def _mapping(items: Any) -> dict[Any, Any]:
    try:
        made = {key: decode(item) for key, item in items}
    except (TypeError, ValueError) as error:
        raise InvalidPlan(f"a mapping is written as pairs of a name or number and a value, got {items!r}.") from error
    if len(made) != len(items):
        raise InvalidPlan(f"a key of the mapping {items!r} is given twice.")
    return made
