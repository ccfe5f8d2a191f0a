"""`clipwise epsilon`: what a run's epsilon is, by every accountant, and what that number is worth."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from clipwise._extras import need
from clipwise.cli.terminal import Later, number, table
from clipwise.errors import AccountingError, ClipwiseError

if TYPE_CHECKING:
    from clipwise.accounting import Event, Guarantee, Ledger, Relation
    from clipwise.cli.published import Published
    from clipwise.sampling import Sampling

NAME = "epsilon"
HELP = "say what epsilon a run has, by every accountant, and what the number is worth"

PLOT_FORMATS = (".svg", ".pdf", ".png")

_RUN_OPTIONS = (
    "noise_multiplier",
    "sample_size",
    "rate",
    "batch_size",
    "bands",
    "steps",
    "sampling",
    "max_batch_size",
    "largest",
)

_EPILOG = """\
examples:
  clipwise epsilon --noise-multiplier 1.1 --sample-size 60000 --batch-size 256 --steps 14040 --delta 1e-5
  clipwise epsilon --noise-multiplier 0:1.3,7000:1.0 --sample-size 60000 --batch-size 256 --steps 14040 --delta 1e-5
  clipwise epsilon --ledger run/ledger.json --delta 1e-5 --json
  clipwise epsilon --ledger run --delta 1e-5      a run's folder, also one that was interrupted
  clipwise epsilon --paper snli

Steps are optimizer steps, counted and not computed from epochs. With --sampling poisson, --batch-size is the expected
batch size, which may be a fraction; a shuffling data loader is --sampling shuffled. --sample-size says that the number
of records is public: the guarantee is about blanking a record. --rate is a public rate for any number of records: about
adding or removing one.

exit code: 0 success, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--noise-multiplier",
        type=noise,
        metavar="SIGMA",
        help="noise deviation over sensitivity; a schedule as STEP:SIGMA,STEP:SIGMA",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--ledger",
        metavar="PATH",
        help="account for a saved ledger instead of the options above, or for the folder of a run, finished or not",
    )
    parser.add_argument(
        "--paper",
        choices=Later(_papers),
        metavar="RUN",
        help="account for a run of the paper, beside what it reports: %(choices)s",
    )
    add_accountant(parser, "only this one (default: all that are installed)")
    parser.add_argument("--group", type=int, default=1, metavar="K", help="protect K records together (default 1)")
    parser.add_argument("--plot", metavar="FILE", help="draw the privacy curves (.svg, .pdf or .png)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a run, shared with `clipwise noise`."""
    parser.add_argument("--sample-size", type=int, metavar="N", help="records in the data set, a public number")
    parser.add_argument("--rate", type=float, metavar="Q", help="instead of N: a public Poisson rate, for any data set")
    parser.add_argument("--batch-size", type=number, metavar="B", help="(expected) batch size")
    parser.add_argument("--steps", type=int, metavar="T", help="optimizer steps")
    parser.add_argument("--delta", type=float, help="the delta of (epsilon, delta), below 1/N")
    parser.add_argument(
        "--sampling",
        choices=Later(_samplings),
        metavar="NAME",
        help="how batches are drawn (default poisson): %(choices)s",
    )
    parser.add_argument("--max-batch-size", type=int, metavar="CAP", help="cut Poisson batches at CAP records")
    parser.add_argument("--bands", type=int, metavar="K", help="groups of --sampling cyclic-poisson")
    parser.add_argument("--largest", type=int, metavar="N", help="with --rate and a cap: never more records than this")
    parser.add_argument(
        "--relation",
        choices=Later(_relations),
        metavar="NAME",
        help="what neighbouring data sets are (default: what the sampling supports): %(choices)s",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_accountant(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Declare the option that chooses an accountant."""
    choices = Later(_accountants)
    parser.add_argument("--accountant", choices=choices, metavar="NAME", default=default, help=f"{what}: %(choices)s")


def _accountants() -> Iterable[str]:
    from clipwise.accounting import ACCOUNTANTS

    return ACCOUNTANTS


def _samplings() -> Iterable[str]:
    from clipwise.sampling import SAMPLINGS

    return [name.replace("_", "-") for name in SAMPLINGS]


def _relations() -> Iterable[str]:
    from clipwise.accounting import Relation

    return [name.replace("_", "-") for name in get_args(Relation)]


def _papers() -> Iterable[str]:
    from clipwise.cli.published import PUBLISHED

    return PUBLISHED


def noise(text: str) -> float | dict[int, float]:
    """A noise multiplier, or a schedule of them by the step at which each begins.

    >>> noise("1.1"), noise("0:2.0,500:1.0")
    (1.1, {0: 2.0, 500: 1.0})
    """
    if ":" not in text:
        return float(text)
    pairs = [part.split(":") for part in text.split(",")]
    schedule = {int(step): float(value) for step, value in pairs}
    if len(schedule) < len(pairs):
        raise ValueError(f"a step is given twice in {text!r}")
    return schedule


def events_of(given: float | dict[int, float], sampling: Sampling, steps: int) -> tuple[Event, ...]:
    """What a run with this noise puts on its ledger."""
    from clipwise.accounting import GaussianSteps, Steps

    schedule = given if isinstance(given, dict) else {0: given}
    for each in schedule.values():
        if not each > 0.0:
            raise AccountingError(f"--noise-multiplier must be > 0, got {each:g}.")
    if not isinstance(given, dict):
        return (GaussianSteps(sampling, given, steps),)
    found = Steps(schedule)
    found.check(steps)
    return tuple(GaussianSteps(sampling, each, count) for each, count in found.stretches(0, steps))


def fill_in(args: argparse.Namespace, wanted: dict[str, Callable[[str], Any]]) -> None:
    """Ask for options that are missing: at a terminal one by one, else all in one error."""
    missing = [name for name in wanted if getattr(args, name) is None]
    flags = ", ".join(map(_flag, missing))
    if missing and not (sys.stdin.isatty() and sys.stdout.isatty() and not args.json):
        raise AccountingError(f"missing: {flags}.")
    for name in missing:
        text = input(f"{name.replace('_', ' ')}: ")
        try:
            setattr(args, name, wanted[name](text))
        except ValueError as error:
            raise AccountingError(f"{_flag(name)} must be a number, got {text!r}.") from error


def relation_asked(args: argparse.Namespace) -> Relation | None:
    """The relation in Python's spelling; None: what the sampling supports."""
    return None if args.relation is None else args.relation.replace("-", "_")


def scheme_of(args: argparse.Namespace, batch_size: float) -> Sampling:
    """The sampling scheme that the options describe."""
    from clipwise.sampling import SAMPLINGS, CyclicPoisson, FullBatch, Poisson

    name = args.sampling or "poisson"
    if name != "poisson":
        refuse_given(args, ("rate", "largest"), "for --sampling poisson only")
    if args.max_batch_size is not None and name != "poisson":
        raise AccountingError("--max-batch-size is for --sampling poisson only.")
    if name == "cyclic-poisson":
        return CyclicPoisson(args.sample_size, batch_size, args.bands)
    refuse_given(args, ("bands",), "for --sampling cyclic-poisson only")
    if name == "full-batch":
        if args.batch_size not in (None, args.sample_size):
            raise AccountingError("--batch-size has no meaning with --sampling full-batch: leave it out.")
        return FullBatch(args.sample_size)
    if args.rate is not None:
        refuse_given(args, ("sample_size",), "--rate is for any number of records; give one of the two")
        return Poisson(batch_size=batch_size, max_batch_size=args.max_batch_size, rate=args.rate, largest=args.largest)
    if name == "poisson":
        return Poisson(args.sample_size, batch_size, args.max_batch_size, largest=args.largest)
    kind: Callable[[int, Any], Sampling] = SAMPLINGS[name.replace("-", "_")]
    return kind(args.sample_size, batch_size)


def needs(args: argparse.Namespace) -> dict[str, Callable[[str], Any]]:
    """The options without which a run is not described, and how to read them."""
    wanted: dict[str, Callable[[str], Any]] = {"sample_size": int, "batch_size": number, "steps": int, "delta": float}
    if args.sampling == "full-batch":
        del wanted["batch_size"]
    if args.sampling == "cyclic-poisson":
        wanted["bands"] = int
    if args.rate is not None:
        del wanted["sample_size"]
    return wanted


def refuse_given(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options that would be ignored."""
    given = [_flag(name) for name in names if getattr(args, name) is not None]
    if given:
        raise AccountingError(f"{', '.join(given)}: {reason}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _events(args: argparse.Namespace) -> tuple[Event, ...]:
    from clipwise.cli.published import PUBLISHED

    if args.paper is not None:
        refuse_given(args, (*_RUN_OPTIONS, "delta", "ledger"), "--paper has its own settings; leave the option out")
        args.delta = PUBLISHED[args.paper].delta
        return PUBLISHED[args.paper].events
    if args.ledger is not None:
        refuse_given(args, _RUN_OPTIONS, "a ledger has its own settings; leave the option out")
        fill_in(args, {"delta": float})
        return _ledger(Path(args.ledger)).events
    fill_in(args, {"noise_multiplier": noise, **needs(args)})
    return events_of(args.noise_multiplier, scheme_of(args, args.batch_size), args.steps)


def _ledger(path: Path) -> Ledger:
    """A ledger that was saved, of a run's folder too; of a run that is not finished what it has spent so far."""
    from clipwise.accounting import Ledger
    from clipwise.report import RunFolder

    folder = RunFolder(path if path.is_dir() else path.parent)
    if not folder.interrupted or path not in (folder.path, folder.ledger):
        return Ledger.load(folder.ledger if path.is_dir() else path)
    found = folder.spent()
    since = "up to its last checkpoint; it has a seed, and makes later steps again" if found.seeded else "so far"
    print(
        f"clipwise: {folder.path} holds a run that is not finished: {found.steps:,} steps are spent of "
        f"{found.planned:,} planned ({since}).",
        file=sys.stderr,
    )
    return found.ledger


def _panel(args: argparse.Namespace, events: tuple[Event, ...], published: Published | None) -> dict[str, Guarantee]:
    from clipwise.accounting import ACCOUNTANTS, account, privacy_panel

    relation = relation_asked(args)
    if args.accountant is not None:
        # Neither an approximation nor a published value stands alone.
        bound = ACCOUNTANTS[args.accountant].kind != "approximation"
        alone = bound and (published is None or args.accountant == "exact")
        beside: tuple[str, ...] = () if alone else ("exact",)
        names: tuple[str, ...] = (*beside, args.accountant)
        return {name: account(events, args.delta, name, relation=relation, group=args.group) for name in names}
    return privacy_panel(events, args.delta, relation=relation, group=args.group)


def reading(panel: dict[str, Guarantee], published: Published | None = None) -> list[str]:
    """The result in plain language: what it is, what it assumes, and why accountants differ."""
    first = next(iter(panel.values()))
    lines = [first.statement()]
    if published is not None:
        return [*lines, published.sentence(panel["exact"])]
    exact, gdp = panel.get("exact"), panel.get("gdp")
    if exact is None or exact.kind != "numerically exact":  # a bound does not show how far an approximation is off
        return lines
    if gdp is not None and gdp.kind == "approximation" and exact.epsilon > 0.0:
        ratio = gdp.epsilon / exact.epsilon
        if abs(ratio - 1.0) >= 0.01:
            side = "under-states" if ratio < 1.0 else "over-states"
            lines.append(
                f"gdp {side} epsilon ({gdp.printed}, {ratio:.2f} of the exact value): the central limit theorem "
                "sees only the variance of the privacy loss, while rare large losses decide at this delta."
            )
    return lines


def _print(panel: dict[str, Guarantee], lines: list[str]) -> None:
    interval = any(g.lower is not None for g in panel.values())
    rows = [[name, g.kind, g.printed, *([_least(g)] * interval), f"{g.seconds:.3f}"] for name, g in panel.items()]
    print(table(["accountant", "kind", "epsilon", *(["at least"] * interval), "seconds"], rows, left=2))
    print()
    for line in lines:
        print(line)
    for warning in dict.fromkeys(w for g in panel.values() for w in g.warnings):
        print(f"warning: {warning}")


def _least(guarantee: Guarantee) -> str:
    """The lower end of an interval, rounded down."""
    return "" if guarantee.lower is None else f"{math.floor(guarantee.lower * 1000) / 1000:.3f}"


def _check_plot(path: str) -> None:
    """Refuse a file that cannot be written before minutes are spent on it."""
    target = Path(path)
    if target.suffix.lower() not in PLOT_FORMATS or path.endswith("/") or target.is_dir():
        raise AccountingError(f"--plot needs a file that ends in {', '.join(PLOT_FORMATS)}, got {path!r}.")
    if not target.parent.is_dir():
        raise AccountingError(f"--plot {path}: there is no directory {target.parent}.")


def _answer(args: argparse.Namespace) -> int:
    """Print the panel; the result is the exit code."""
    if args.plot is not None:
        need("plots", "--plot")
        _check_plot(args.plot)
        if args.group != 1:
            raise AccountingError("--plot draws the curves of a single record: leave --group out.")
    events = _events(args)
    from clipwise.cli.published import published_for

    relation = relation_asked(args)
    published = published_for(events, args.delta) if relation in (None, "zero_out") and args.group == 1 else None
    panel = _panel(args, events, published)
    if args.plot is not None:
        from clipwise.accounting import privacy_curve
        from clipwise.plots import privacy_curves

        curve = privacy_curve(events, relation=relation, min_delta=min(1e-10, args.delta))
        privacy_curves(curve, delta=args.delta).savefig(args.plot)
    lines = reading(panel, published)
    if args.json:
        body: dict[str, Any] = {"accountants": {name: g.to_dict() for name, g in panel.items()}, "reading": lines}
        if published is not None:
            body["published"] = {"title": published.title, "epsilon": published.claim}
        if args.plot is not None:
            body["curve"] = curve.to_dict()
        print(json.dumps(body, indent=1))
        return 0
    _print(panel, lines)
    if args.plot is not None:
        word = "tight mu" if curve.kind == "numerically exact" else "mu, an upper bound"
        print(f"{word}: {curve.mu:.4f} for delta >= {curve.min_delta:g} (central limit theorem: {curve.clt_mu:.4f})")
        print(f"privacy curves: {args.plot}")
    return 0


def guarded(answer: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; numbers beyond floats and files that cannot be written are the user's to mend."""
    try:
        return answer(args)
    except (ClipwiseError, BrokenPipeError):
        raise
    except EOFError as error:
        raise AccountingError("the input ended before every option was given.") from error
    except (ArithmeticError, OSError, ValueError) as error:
        raise AccountingError(f"{type(error).__name__}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return guarded(_answer, args)
