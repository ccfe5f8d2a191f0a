"""`clipwise check module:function`: can this model be trained privately as it is, by which rules, at what memory?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from clipwise._show import mebibytes
from clipwise.cli.terminal import table
from clipwise.errors import ClipwiseError, DataError, NotSeparable

if TYPE_CHECKING:
    from torch import Tensor

    from clipwise.engine import Summary

NAME = "check"
HELP = "say whether a model can be trained privately as it is, by which rules, and estimate the memory"

_EPILOG = """\
The function takes no arguments and returns one of
  (model, loss_fn, batch)   loss_fn(model, batch) gives one loss per sample; the batch has at least three samples
  (losses, params)          one loss per sample, and tensors or a mapping from names to tensors
Only the first form can be checked fully: the forward pass is rerun with one sample changed, and with one removed.

exit code: 0 yes, 1 no (the reason is printed), 2 the function cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("target", metavar="MODULE:FUNCTION", type=_target, help="module or file.py, and function")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _target(text: str) -> tuple[str, str]:
    from clipwise.training import split_target

    target = split_target(text)
    if target is None:
        raise argparse.ArgumentTypeError(f"expected module:function or file.py:function, got {text!r}")
    return target


def _build(module_name: str, function_name: str) -> tuple[Any, ...]:
    from clipwise.training import guarded, imported

    made = guarded(f"{function_name}()", imported(module_name, function_name))
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise DataError(
            f"{function_name}() must return (model, loss_fn, batch) or (losses, params), got {type(made).__name__}"
            + (f" of length {len(made)}." if isinstance(made, tuple) else ".")
        )
    return made


def _examine(made: tuple[Any, ...]) -> tuple[Summary, dict[str, Tensor]]:
    """The engine's summary and the parameters it is about; raises a ClipwiseError that says why not."""
    import clipwise as cw
    from clipwise.training import guarded

    if len(made) == 2:
        losses, params = made
        if not isinstance(params, Iterable):
            raise DataError(f"params must be tensors or a mapping from names to tensors, got {type(params).__name__}.")
        named = dict(params) if isinstance(params, Mapping) else {f"#{k}": p for k, p in enumerate(params)}
        return cw.check(losses, named), named
    model, loss_fn, batch = made
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = guarded("loss_fn(model, batch)", lambda: loss_fn(model, batch))
    summary = cw.check(losses, named)
    cw.check_model(model, loss_fn, batch)
    return summary, named


def _print_refusal(target: str, error: ClipwiseError) -> None:
    separable = "no" if isinstance(error, NotSeparable) else "not known"
    print(f"{target}: cannot be trained privately as it is")
    print(f"  separable  {separable}")
    first, *others = str(error).splitlines()
    print(f"  reason     {type(error).__name__}: {first}")
    for other in others:
        print(f"             {other}")


def _parameter_rows(summary: Summary, params: Mapping[str, Tensor]) -> list[list[str]]:
    """One row for each parameter and kind of use."""
    rows = []
    for name, p in params.items():
        uses = [(node.name, node.rule, node.layout, node.norm) for node in summary.nodes if name in node.parameters]
        for use in dict.fromkeys(uses):
            times = f" x{uses.count(use)}" if uses.count(use) > 1 else ""
            rows.append([name, "x".join(map(str, p.shape)) or "scalar", use[0] + times, *use[1:]])
    return rows


def _print_summary(target: str, summary: Summary, params: Mapping[str, Tensor], rerun: bool) -> None:
    seen = (
        "yes; no other loss moves when a sample is changed or removed"
        if rerun
        else "yes, as far as the graph shows; return (model, loss_fn, batch) to have the forward pass rerun"
    )
    values = sum(p.numel() for p in params.values())
    print(f"{target}: can be trained privately as it is")
    print(f"  samples     {summary.batch_size}")
    print(f"  separable   {seen}")
    print(f"  parameters  {len(params)} with {values:,} values; {len(summary.nodes)} operations meet them")
    for name in summary.unreached:
        print(f"              {name} is reached by no sample: its gradient is zero, with noise like every other")
    for name in () if rerun else summary.unseen:
        print(f"              the other operand of {name} is taken for a constant: the graph does not show its origin")
    for way, size in summary.bytes.items():
        print(f"  memory      {mebibytes(size)} beyond the forward pass, estimated ({way.replace('_', ' ')})")
    print()
    headings = ["parameter", "shape", "operation", "rule", "batch axis", "norms"]
    print(table(headings, _parameter_rows(summary, params), left=6))


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 when the model is refused."""
    target = ":".join(args.target)
    made = _build(*args.target)
    try:
        summary, params = _examine(made)
    except DataError:
        raise
    except ClipwiseError as error:
        if args.json:
            print(json.dumps({"target": target, "ok": False, "error": type(error).__name__, "reason": str(error)}))
        else:
            _print_refusal(target, error)
        return 1
    if args.json:
        print(json.dumps({"target": target, "ok": True, "rerun": len(made) == 3, **asdict(summary)}, indent=2))
    else:
        _print_summary(target, summary, params, rerun=len(made) == 3)
    return 0
