"""`[clip]`: a clipping rule, style or schedule, under the names that Python code uses for them.

```toml
[clip]                    # flat: one norm over all parameters
rule = "Abadi"
R = 1.0

[clip]                    # one rule for every layer; or [clip.layers] with a rule for each by its name
style = "Layerwise"
rule = "Abadi"
R = 0.5
noise = "per_layer"

[clip]                    # the first pattern that a parameter's name matches decides
style = "Groupwise"
[clip.groups]
"encoder.*" = { rule = "Abadi", R = 1.0 }
"*" = { rule = "Abadi", R = 0.5 }

[clip]                    # each of the two is a table like the ones above
schedule = "MixUp"
switch_at = 0.95          # a fraction of the steps, or a step number
small = { rule = "Abadi", R = 0.1 }
large = { rule = "Abadi", R = 20.0 }
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from clipwise import clipping
from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, MixUp, Rule, Style
from clipwise.errors import InvalidConfig, InvalidPlan
from clipwise.training.config.toml import TomlTable

__all__ = ["read_clip"]

RULES: dict[str, type[Any]] = {
    rule.__name__: rule
    for rule in (
        clipping.Abadi,
        clipping.Automatic,
        clipping.BatchClip,
        clipping.Global,
        clipping.GlobalScaled,
        clipping.NoClip,
        clipping.Normalize,
    )
}
STYLES = ("Flat", "Groupwise", "Layerwise")
SCHEDULES = ("MixUp",)


def read_clip(table: TomlTable) -> Clip:
    """The clipping of a table.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_clip(TomlText.parse('rule = "Automatic"').root())
    Flat(rule=Automatic(R=1.0, gamma=0.01))
    """
    try:
        if table.text("schedule", None, SCHEDULES) is None:
            return _style(table)
        at = table.raw("switch_at")
        if at is None:
            table.fail(None, "'switch_at' is missing; it is a fraction of the steps, or a step number.")
        small, large = (_style(_needed(table, name)) for name in ("small", "large"))
        table.close()
        return MixUp(small, large, at)
    except InvalidConfig:
        raise
    except InvalidPlan as error:
        table.fail(None, str(error))


def _needed(table: TomlTable, name: str) -> TomlTable:
    inner = table.table(name)
    if not inner.values:
        table.fail(None, f"{name!r} is missing; it is a table with a rule.")
    return inner


def _style(table: TomlTable) -> Style:
    name = table.text("style", "Flat", STYLES)
    if name == "Flat":
        return Flat(_rule(table))
    noise: Any = table.text("noise", "joint", ("joint", "per_layer"))
    if name == "Groupwise":
        groups = _rules(_needed(table, "groups"))
        table.close()
        return Groupwise(groups, noise=noise)
    if "layers" not in table:
        return Layerwise(_rule(table), noise)
    layers = _rules(_needed(table, "layers"))
    table.close()
    return Layerwise(layers, noise)


def _rules(table: TomlTable) -> Mapping[str, Rule]:
    return {name: _rule(inner) for name, inner in table.tables().items()}


def _rule(table: TomlTable) -> Rule:
    """A rule and its numbers; nothing else may be in the table."""
    kind = RULES[table.text("rule", choices=RULES)]
    numbers = {
        f.name: table.number(f.name) if f.default is MISSING else table.number(f.name, f.default) for f in fields(kind)
    }
    table.close()
    rule: Rule = kind(**numbers)
    return rule
