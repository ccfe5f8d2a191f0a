"""Write the table of the paper's epsilons: `python -m papers.epsilons` makes epsilons.json and epsilons.md beside this.

The paper (Bu et al., On the Convergence and Calibration of Deep Learning with Differential Privacy, TMLR 2023) reports
epsilon by the central limit theorem's Gaussian DP. Its settings are its own; where the text leaves the number of steps
open, the one that fits its claim is taken and named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipwise.accounting import GaussianSteps, account, account_delta, noise_multiplier, saddle_interval, tight_mu
from clipwise.accounting.problem import pose
from clipwise.sampling import FullBatch, Poisson, Sampling, Shuffled


@dataclass(frozen=True)
class Experiment:
    name: str
    claim: float
    sampling: Sampling
    noise: float
    steps: int
    delta: float


EXPERIMENTS = (
    Experiment("CIFAR10, 15 epochs", 1.96, Poisson(50_000, 1_000), 1.3, 750, 1e-5),
    Experiment("MNIST, 60 epochs", 2.32, Poisson(60_000, 256), 1.1, 14_040, 1e-5),
    Experiment("SNLI, 3 epochs", 1.25, Poisson(550_152, 32), 0.4, 51_576, 1 / 550_152),
    Experiment("SNLI, as run", 1.25, Poisson(550_152, 32), 0.4, 54_076, 1 / 550_152),
    Experiment("California, 50 epochs", 4.41, Poisson(18_576, 256), 1.0, 3_650, 1 / (1.1 * 18_576)),
    Experiment("Wine, full batch", 4.40, FullBatch(1_279), 35.0, 2_000, 1 / (1.1 * 1_279)),
)


def check(experiment: Experiment) -> dict[str, Any]:
    """Everything the table says about one experiment."""
    events = (GaussianSteps(experiment.sampling, experiment.noise, experiment.steps),)
    delta = experiment.delta
    exact = account(events, delta)
    row: dict[str, Any] = {
        "experiment": experiment.name,
        "noise_multiplier": experiment.noise,
        "steps": experiment.steps,
        "delta": delta,
        "claim": experiment.claim,
        "exact": exact.epsilon,
        "exact_kind": exact.kind,
        "exact_printed": exact.printed,
        **{name: account(events, delta, name).epsilon for name in ("gdp", "pld", "rdp", "edgeworth")},  # type: ignore[arg-type]
        "replace_one": account(events, delta, relation="replace_one").epsilon,
        "delta_at_claim_over_delta": account_delta(events, experiment.claim).delta / delta,
        "noise_for_claim": noise_multiplier(experiment.claim, delta, experiment.sampling, experiment.steps),
        "tight_mu": tight_mu(events),
    }
    row["berry_esseen_interval"] = saddle_interval(pose(events).upper[0], delta)
    if isinstance(experiment.sampling, Poisson):
        shuffled = Shuffled(experiment.sampling.sample_size, experiment.sampling.batch_size)
        guarantee = account((GaussianSteps(shuffled, experiment.noise, experiment.steps),), delta)
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
    folder = Path(__file__).parent
    rows = [check(experiment) for experiment in EXPERIMENTS]
    (folder / "epsilons.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    (folder / "epsilons.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
