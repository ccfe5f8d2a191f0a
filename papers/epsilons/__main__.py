"""The five epsilons that the paper reports, by every accountant: `clipwise reproduce epsilons`.

Writes epsilons.json, and its table in docs/accounting.md.

The paper reports epsilon by the central limit theorem's Gaussian DP; its settings are in clipwise.cli.published,
where `clipwise epsilon --paper` finds them too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from clipwise import Poisson, Shuffled
from clipwise.accounting import GaussianSteps, account, account_delta, noise_multiplier, tight_mu
from clipwise.cli.published import PUBLISHED, Published
from papers.pages import DOCS, put


def check(run: Published) -> dict[str, Any]:
    """Everything the table says about one run."""
    events, delta = run.events, run.delta
    exact = account(events, delta)
    row: dict[str, Any] = {
        "experiment": run.title,
        "noise_multiplier": run.noise_multiplier,
        "steps": run.steps,
        "delta": delta,
        "claim": run.claim,
        "exact": exact.epsilon,
        "exact_kind": exact.kind,
        "exact_printed": exact.printed,
        **{name: account(events, delta, name).epsilon for name in ("gdp", "pld", "rdp", "edgeworth")},
        "replace_one": account(events, delta, relation="replace_one").epsilon,
        "delta_at_claim_over_delta": account_delta(events, run.claim).delta / delta,
        "noise_for_claim": noise_multiplier(run.claim, delta, run.sampling, run.steps),
        "tight_mu": tight_mu(events),
    }
    if isinstance(run.sampling, Poisson):
        shuffled = Shuffled(run.sampling.sample_size, run.sampling.batch_size)
        guarantee = account((GaussianSteps(shuffled, run.noise_multiplier, run.steps),), delta)
        row["shuffled"] = [guarantee.lower, guarantee.epsilon]
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as it stands in the documentation."""
    header = ["experiment", "σ", "steps", "claimed", "GDP (CLT)", "**exact**", "PLD", "RDP"]
    lines = [[*header, "δ at the claim / δ", "σ for the claim"], ["---"] * (len(header) + 2)]
    for row in rows:
        setting = [row["experiment"], f"{row['noise_multiplier']:g}", f"{row['steps']:,}", f"{row['claim']:.2f}"]
        values = [f"{row['gdp']:.3f}", f"**{row['exact_printed']}**", f"{row['pld']:.4f}", f"{row['rdp']:.3f}"]
        lines.append([*setting, *values, f"{row['delta_at_claim_over_delta']:.3g}", f"{row['noise_for_claim']:.3f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="clipwise reproduce epsilons")
    parser.add_argument("--quick", action="store_true", help="the first run only; writes nothing")
    if parser.parse_args().quick:
        print(markdown([check(next(iter(PUBLISHED.values())))]))
        return
    folder = Path(__file__).parent
    rows = [check(run) for run in PUBLISHED.values()]
    (folder / "epsilons.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    put(DOCS / "accounting.md", "epsilons", table)
    print(table)


if __name__ == "__main__":
    main()
