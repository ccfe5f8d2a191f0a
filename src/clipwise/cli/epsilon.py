"""`clipwise epsilon`: what a run's epsilon is, by every accountant, and what that number is worth."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clipwise.cli.table import table
from clipwise.errors import AccountingError, ClipwiseError

if TYPE_CHECKING:
    from clipwise.accounting import Accountant, Event, Guarantee
    from clipwise.sampling import Sampling

NAME = "epsilon"
HELP = "say what epsilon a run has, by every accountant, and what the number is worth"

SCHEMES = ("poisson", "full-batch", "shuffled", "fixed-size")
RELATIONS = ("add-remove", "replace-one", "zero-out")
ACCOUNTANTS = ("exact", "rdp", "pld", "gdp", "edgeworth")

_EPILOG = """\
examples:
  clipwise epsilon --noise-multiplier 1.1 --sample-size 60000 --batch-size 256 --steps 14040 --delta 1e-5
  clipwise epsilon --ledger run/ledger.json --delta 1e-5 --json

Steps are optimizer steps, counted and not computed from epochs. With --sampling poisson, --batch-size is the expected
batch size; a shuffling data loader is --sampling shuffled.

exit code: 0 success, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--noise-multiplier", type=float, metavar="SIGMA", help="noise deviation over sensitivity")
    add_run_arguments(parser)
    parser.add_argument("--ledger", metavar="FILE", help="account for a saved ledger instead of the options above")
    parser.add_argument("--accountant", choices=ACCOUNTANTS, help="only this one (default: all that are installed)")
    parser.add_argument("--group", type=int, default=1, metavar="K", help="protect K records together (default 1)")
    parser.add_argument("--plot", metavar="FILE", help="draw the privacy curves (.svg, .pdf or .png)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a run, shared with `clipwise noise`."""
    parser.add_argument("--sample-size", type=int, metavar="N", help="records in the data set, a public number")
    parser.add_argument("--batch-size", type=int, metavar="B", help="(expected) batch size")
    parser.add_argument("--steps", type=int, metavar="T", help="optimizer steps")
    parser.add_argument("--delta", type=float, help="the delta of (epsilon, delta), below 1/N")
    parser.add_argument(
        "--sampling", choices=SCHEMES, default="poisson", help="how batches are drawn (default poisson)"
    )
    parser.add_argument("--max-batch-size", type=int, metavar="CAP", help="cut Poisson batches at CAP records")
    parser.add_argument(
        "--relation",
        choices=RELATIONS,
        default="add-remove",
        help="what neighbouring data sets are (default add-remove)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def fill_in(args: argparse.Namespace, wanted: dict[str, Callable[[str], Any]]) -> None:
    """Ask for options that are missing: at a terminal one by one, else all in one error."""
    missing = [name for name in wanted if getattr(args, name) is None]
    flags = ", ".join("--" + name.replace("_", "-") for name in missing)
    if missing and not (sys.stdin.isatty() and sys.stdout.isatty() and not args.json):
        raise AccountingError(f"missing: {flags}.")
    for name in missing:
        text = input(f"{name.replace('_', ' ')}: ")
        try:
            setattr(args, name, wanted[name](text))
        except ValueError as error:
            raise AccountingError(f"--{name.replace('_', '-')} must be a number, got {text!r}.") from error


def scheme_of(args: argparse.Namespace, batch_size: int) -> Sampling:
    """The sampling scheme that the options describe."""
    from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

    if args.max_batch_size is not None and args.sampling != "poisson":
        raise AccountingError("--max-batch-size is for --sampling poisson only.")
    if args.sampling == "poisson":
        return Poisson(args.sample_size, batch_size, args.max_batch_size)
    if args.sampling == "full-batch":
        return FullBatch(args.sample_size)
    return (
        Shuffled(args.sample_size, batch_size)
        if args.sampling == "shuffled"
        else FixedSize(args.sample_size, batch_size)
    )


def needs(args: argparse.Namespace) -> dict[str, Callable[[str], Any]]:
    """The options without which a run is not described, and how to read them."""
    wanted: dict[str, Callable[[str], Any]] = {"sample_size": int, "batch_size": int, "steps": int, "delta": float}
    if args.sampling == "full-batch":
        del wanted["batch_size"]
    return wanted


def _events(args: argparse.Namespace) -> tuple[Event, ...]:
    from clipwise.accounting import GaussianSteps, Ledger

    if args.ledger is not None:
        fill_in(args, {"delta": float})
        return Ledger.load(args.ledger).events
    fill_in(args, {"noise_multiplier": float, **needs(args)})
    if not args.noise_multiplier > 0.0:
        raise AccountingError(f"--noise-multiplier must be > 0, got {args.noise_multiplier:g}.")
    return (GaussianSteps(scheme_of(args, args.batch_size), args.noise_multiplier, args.steps),)


def _panel(args: argparse.Namespace, events: tuple[Event, ...]) -> dict[str, Guarantee]:
    from clipwise.accounting import account
    from clipwise.accounting.panel import panel_of

    relation = args.relation.replace("-", "_")
    if args.accountant is not None:
        # An approximation never stands alone.
        beside: tuple[Accountant, ...] = ("exact",) if args.accountant in ("gdp", "edgeworth") else ()
        names: tuple[Accountant, ...] = (*beside, args.accountant)
        return {name: account(events, args.delta, name, relation, args.group) for name in names}
    return panel_of(events, args.delta, relation, args.group)


def reading(panel: dict[str, Guarantee]) -> list[str]:
    """The result in plain language: what it is, what it assumes, and why accountants differ."""
    first = next(iter(panel.values()))
    lines = [first.statement()]
    exact, gdp = panel.get("exact"), panel.get("gdp")
    if exact is not None and gdp is not None and gdp.kind == "approximation" and exact.epsilon > 0.0:
        ratio = gdp.epsilon / exact.epsilon
        if abs(ratio - 1.0) >= 0.01:
            side = "under-states" if ratio < 1.0 else "over-states"
            lines.append(
                f"gdp {side} epsilon ({gdp.epsilon:.3f}, {ratio:.2f} of the exact value): the central limit theorem "
                "sees only the variance of the privacy loss, while rare large losses decide at this delta."
            )
    return lines


def _print(panel: dict[str, Guarantee]) -> None:
    rows = [
        [
            name,
            g.kind,
            g.printed,
            "" if g.lower is None else f"{math.floor(g.lower * 1000) / 1000:.3f}",
            f"{g.seconds:.3f}",
        ]
        for name, g in panel.items()
    ]
    print(table(["accountant", "kind", "epsilon", "at least", "seconds"], rows, left=2))
    print()
    for line in reading(panel):
        print(line)
    for warning in dict.fromkeys(w for g in panel.values() for w in g.warnings):
        print(f"warning: {warning}")


def _answer(args: argparse.Namespace) -> int:
    """Print the panel; the result is the exit code."""
    events = _events(args)
    panel = _panel(args, events)
    if args.plot is not None:
        from clipwise.accounting import privacy_curve
        from clipwise.plots import privacy_curves

        curve = privacy_curve(events, args.relation.replace("-", "_"), min(1e-10, args.delta))
        privacy_curves(curve, delta=args.delta).savefig(args.plot)
    if args.json:
        body: dict[str, Any] = {
            "accountants": {name: g.as_dict() for name, g in panel.items()},
            "reading": reading(panel),
        }
        if args.plot is not None:
            body["curve"] = curve.as_dict()
        print(json.dumps(body, indent=1))
        return 0
    _print(panel)
    if args.plot is not None:
        print(f"tight mu: {curve.mu:.4f} for delta >= {curve.min_delta:g} (central limit theorem: {curve.clt_mu:.4f})")
        print(f"privacy curves: {args.plot}")
    return 0


def guarded(answer: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; numbers beyond floats and files that cannot be written are the user's to mend."""
    try:
        return answer(args)
    except ClipwiseError:
        raise
    except (ArithmeticError, OSError, ValueError) as error:
        raise AccountingError(f"{type(error).__name__}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return guarded(_answer, args)
