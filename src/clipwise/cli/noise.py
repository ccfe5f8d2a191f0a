"""`clipwise noise`: the noise (or the steps, or the batch size) that a privacy target allows."""

from __future__ import annotations

import argparse
import json
from decimal import ROUND_CEILING, Context
from typing import Any

from clipwise.cli.epsilon import (
    add_accountant,
    add_run_arguments,
    fill_in,
    guarded,
    needs,
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
        "--noise-multiplier", type=float, metavar="SIGMA", help="given, when solving for something else"
    )
    add_run_arguments(parser)
    add_accountant(parser, "by whose epsilon (default exact)", default="exact")
    parser.add_argument("--free-cap", action="store_true", help="also find the smallest cap that costs under 0.1 %%")


def _solve(args: argparse.Namespace) -> dict[str, Any]:
    from clipwise.accounting import max_batch_size, max_steps, noise_multiplier

    if args.solve != "noise" and not args.noise_multiplier > 0.0:
        raise AccountingError(f"--noise-multiplier must be > 0, got {args.noise_multiplier:g}.")
    run = {"accountant": args.accountant, "relation": relation_asked(args)}
    found = {"noise_multiplier": args.noise_multiplier, "steps": args.steps}
    if args.solve == "batch-size":
        found["batch_size"] = max_batch_size(args.epsilon, args.delta, scheme_of(args, 1), **found, **run)
        return found
    sampling = scheme_of(args, args.batch_size)
    target = (args.epsilon, args.delta, sampling)
    if args.solve == "noise":
        found["noise_multiplier"] = noise_multiplier(*target, args.steps, **run)
    else:
        found["steps"] = max_steps(*target, noise_multiplier=args.noise_multiplier, **run)
    return {**found, "batch_size": sampling.batch_size}


def _rounded_up(noise: float) -> str:
    """Six digits, and never less noise than was found."""
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal(repr(noise)):f}"


def _answer(args: argparse.Namespace) -> int:
    """Print the solution and what it is worth; the result is the exit code."""
    from clipwise.accounting import GaussianSteps, account, free_cap
    from clipwise.sampling import Poisson

    wanted: dict[str, Any] = {"epsilon": float, **needs(args)}
    solved = {"noise": "noise_multiplier", "steps": "steps", "batch-size": "batch_size"}[args.solve]
    refuse_given(args, (solved,), f"--solve {args.solve} finds it; leave the option out")
    if args.solve != "noise":
        wanted["noise_multiplier"] = float
        wanted.pop(solved, None)
    fill_in(args, wanted)
    found = _solve(args)
    if found["steps"] == 0 or found["batch_size"] == 0:
        raise AccountingError(f"Not even one step fits into epsilon {args.epsilon:g}: raise the noise multiplier.")
    sampling = scheme_of(args, found["batch_size"])
    relation = relation_asked(args)
    event = GaussianSteps(sampling, found["noise_multiplier"], found["steps"])
    guarantee = account((event,), args.delta, args.accountant, relation=relation)
    if args.free_cap:
        if not isinstance(sampling, Poisson):
            raise AccountingError("--free-cap is for --sampling poisson only.")
        found["free_cap"] = free_cap(
            sampling, noise_multiplier=event.noise_multiplier, steps=event.steps, delta=args.delta, relation=relation
        )
    # An approximation never stands alone.
    exact = account((event,), args.delta, "exact", relation=relation) if guarantee.kind == "approximation" else None
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
