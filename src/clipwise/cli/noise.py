"""`clipwise noise`: the noise (or the steps, or the batch size) that a privacy target allows."""

from __future__ import annotations

import argparse
import json
from decimal import ROUND_CEILING, Context
from typing import Any

from clipwise.cli.epsilon import (
    add_accountant,
    add_run_arguments,
    events_of,
    fill_in,
    guarded,
    needs,
    noise,
    reading,
    refuse_given,
    relation_asked,
    scheme_of,
)
from clipwise.errors import AccountingError

NAME = "noise"
HELP = "find the noise multiplier, steps or batch size that a privacy target allows"

_EPILOG = """\
examples:
  clipwise noise --epsilon 2 --sample-size 60000 --batch-size 256 --steps 14040 --delta 1e-5
  clipwise noise --epsilon 2 --solve steps --noise-multiplier 1.1 --sample-size 60000 --batch-size 256 --delta 1e-5
  clipwise noise --epsilon 2 --noise-multiplier 0:2,50:1 --sample-size 60000 --batch-size 256 --steps 100 --delta 1e-5

exit code: 0 success, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--epsilon", type=float, help="the target")
    parser.add_argument(
        "--solve", choices=("noise", "steps", "batch-size"), default="noise", help="what to find (default noise)"
    )
    parser.add_argument(
        "--noise-multiplier",
        type=noise,
        metavar="SIGMA",
        help="given, when solving for something else; or the shape of a schedule to be scaled, STEP:SIGMA,STEP:SIGMA",
    )
    add_run_arguments(parser)
    add_accountant(parser, "by whose epsilon (default exact)", default="exact")
    parser.add_argument("--free-cap", action="store_true", help="also find the smallest cap that costs under 0.1 %%")


def _solve(args: argparse.Namespace) -> dict[str, Any]:
    from clipwise.accounting import max_batch_size, max_steps, noise_multiplier, noise_scale

    if args.solve != "noise" and not args.noise_multiplier > 0.0:
        raise AccountingError(f"--noise-multiplier must be > 0, got {args.noise_multiplier:g}.")
    run = {"accountant": args.accountant, "relation": relation_asked(args)}
    found = {"noise_multiplier": args.noise_multiplier, "steps": args.steps}
    if args.solve == "batch-size":
        found["batch_size"] = max_batch_size(args.epsilon, args.delta, scheme_of(args, 1), **found, **run)
        return found
    sampling = scheme_of(args, args.batch_size)
    target = (args.epsilon, args.delta, sampling)
    if isinstance(args.noise_multiplier, dict):
        factor = noise_scale(events_of(args.noise_multiplier, sampling, args.steps), args.epsilon, args.delta, **run)
        found["noise_multiplier"] = {step: each * factor for step, each in sorted(args.noise_multiplier.items())}
    elif args.solve == "noise":
        found["noise_multiplier"] = noise_multiplier(*target, args.steps, **run)
    else:
        found["steps"] = max_steps(*target, noise_multiplier=args.noise_multiplier, **run)
    return {**found, "batch_size": sampling.batch_size}


def _rounded_up(found: float | dict[int, float]) -> str:
    """Six digits, and never less noise than was found."""
    if isinstance(found, dict):
        return ",".join(f"{step}:{_rounded_up(each)}" for step, each in found.items())
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal(repr(found)):f}"


def _answer(args: argparse.Namespace) -> int:
    """Print the solution and what it is worth; the result is the exit code."""
    from clipwise.accounting import account, free_cap
    from clipwise.sampling import Poisson

    wanted: dict[str, Any] = {"epsilon": float, **needs(args)}
    solved = {"noise": "noise_multiplier", "steps": "steps", "batch-size": "batch_size"}[args.solve]
    scheduled = isinstance(args.noise_multiplier, dict)
    if args.solve != "noise" or not scheduled:  # the shape of a schedule is given, and its size is found
        refuse_given(args, (solved,), f"--solve {args.solve} finds it; leave the option out")
    if scheduled and (args.solve != "noise" or args.free_cap):
        raise AccountingError("a schedule of noise is scaled to a target, and nothing else is solved for with it.")
    if args.solve != "noise":
        wanted["noise_multiplier"] = float
        wanted.pop(solved, None)
    fill_in(args, wanted)
    found = _solve(args)
    if found["steps"] == 0 or found["batch_size"] == 0:
        raise AccountingError(f"Not even one step fits into epsilon {args.epsilon:g}: raise the noise multiplier.")
    sampling = scheme_of(args, found["batch_size"])
    relation = relation_asked(args)
    events = events_of(found["noise_multiplier"], sampling, found["steps"])
    guarantee = account(events, args.delta, args.accountant, relation=relation)
    if args.free_cap:
        if not isinstance(sampling, Poisson):
            raise AccountingError("--free-cap is for --sampling poisson only.")
        sigma, count = found["noise_multiplier"], found["steps"]
        found["free_cap"] = free_cap(sampling, noise_multiplier=sigma, steps=count, delta=args.delta, relation=relation)
    # An approximation never stands alone.
    exact = account(events, args.delta, "exact", relation=relation) if guarantee.kind == "approximation" else None
    if args.json:
        beside = {} if exact is None else {"exact": exact.to_dict()}
        print(json.dumps({**found, "guarantee": guarantee.to_dict(), **beside}, indent=1))
        return 0
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {_rounded_up(value) if name == 'noise_multiplier' else value}")
    print()
    for line in reading({args.accountant: guarantee}):
        print(line)
    if exact is not None:
        print(f"The exact accountant gives {exact.printed} for this noise.")
    for warning in guarantee.warnings:
        print(f"warning: {warning}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return guarded(_answer, args)
