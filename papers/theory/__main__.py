"""Regenerate everything that docs/theory.md shows: `clipwise reproduce theory`, or `python -m papers.theory`.

Instances that the search found are read from instances.json and checked again; `--search` searches again (a quarter of
an hour). The last part trains the paper's MNIST network with the monitor, for which it fetches the data; `--mnist` runs
only that, `--no-mnist` all but that. `--quick` does all but MNIST on a small scale, in about a minute, and leaves the
committed files alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import clipwise as cw
from papers.figures import save
from papers.pages import DOCS, put
from papers.theory import figures, monitor, order, table
from papers.theory.networks import Case
from papers.theory.search import markdown as searched
from papers.theory.search import positive_definite, search

HERE = Path(__file__).parent


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load_instances() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "instances.json").read_text(encoding="utf-8"))
    return found


def checked(instances: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every instance once more: its matrix at the start, and its flow."""
    results = {}
    for name, found in instances.items():
        if isinstance(found, list) or found["case"] is None:
            continue
        case = Case.from_dict(found["case"])
        analysis = cw.ntk.analyse(*case.arguments())
        flow = case.flow(points=201)
        results[name] = {
            "claim": found["claim"],
            "network": str(case.architecture),
            "samples": len(case.y),
            "clipping": str(case.clipping),
            "loss_function": case.loss,
            "positive_definite": positive_definite(case, flow),
            "symmetric": analysis.symmetric,
            "min_quadratic": analysis.min_quadratic,
            "min_eigenvalue": analysis.min_eigenvalue,
            "max_imaginary": analysis.max_imaginary,
            "loss_rate_at_the_start": analysis.loss_rate,
            "loss_at_the_start": float(flow.loss[0]),
            "largest_loss": float(flow.loss.max()),
            "loss_at_the_end": float(flow.loss[-1]),
            "speed_at_the_end": float(flow.speed[-1]),
            "t_end": case.t_end,
        }
    return results


FLOWS = {
    "flat_rising": "Small R, flat: the loss rises for a while",
    "layerwise_stuck": "Small R, layerwise: the flow stops above zero",
    "layerwise_diverging": "Small R, layerwise: the loss grows without end",
    "flat_diverging_normalized": "Normalized, logistic loss: it grows without end",
}
"""Instances that are drawn, with their titles."""


def draw(out: Path, instances: dict[str, Any], found: dict[str, Any], flows: dict[str, Any], quick: bool) -> None:
    """All figures."""
    save(out, "spectra", cw.plots.spectra(found["spectra"], "Clipping and the spectrum"))
    drawn = []
    for name, title in FLOWS.items():
        case = Case.from_dict(instances[name]["case"])
        compared = figures.compared(case, points=41 if quick else 401)
        drawn.append(cw.plots.loss_flows(compared, title, linear=name != "layerwise_stuck"))
    save(out, "flows", [drawn[:2], drawn[2:], figures.optimizer_figure(flows)])
    save(out, "noise", [figures.order_figure(found["orders"]), figures.noise_figure(found["noise"])])


def reproduce(out: Path, quick: bool, instances: dict[str, Any]) -> dict[str, Any]:
    """Compute, write and draw; the result is what results.json holds."""
    progress("instances")
    found: dict[str, Any] = {"instances": checked(instances)}
    progress("optimizers")
    stuck = Case.from_dict(instances["layerwise_stuck"]["case"])
    flows = order.flows(stuck, *((21, 3.0) if quick else (201,)))
    found["optimizers"] = order.summary(flows)
    progress("Table 1")
    found["table"] = table.table(instances, networks=6 if quick else 60, flows=1 if quick else 24)
    progress("order of convergence")
    etas = [2.0**-k for k in ((4, 5, 6) if quick else range(4, 11))]
    found["orders"] = order.orders((0.0, 1.0, 4.0) if not quick else (0.0, 2.0), etas, seeds=3 if quick else 20)
    found["noise"] = order.pictures((0.0, 1.0, 4.0, 16.0), (1 / 16, 1 / 128) if quick else (1 / 16, 1 / 256, 1 / 4096))
    found["spectra"] = figures.spectra(20 if quick else 60)
    progress("figures")
    draw(out, instances, found, flows, quick)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _show(out, "table", table.markdown(found["table"]))
    _show(out, "searched", searched(instances))
    return found


def _show(out: Path, name: str, text: str) -> None:
    """The page shows what is kept in this folder."""
    if out == HERE:
        put(DOCS / "theory.md", name, text)


def failures(found: dict[str, Any]) -> list[str]:
    """Cells of the table where what was seen is not what the paper says."""
    return [
        f"{row['row']}: {column}"
        for row in found["table"]
        for column, cell in row["cells"].items()
        if not table.agrees(cell)
    ]


def watch(out: Path, quick: bool) -> None:
    """The monitor in training on MNIST: monitor.json, its table and its figure."""
    watched = monitor.run(out, *((20, 10) if quick else (468, 18)))
    (out / "monitor.json").write_text(json.dumps(watched, indent=1) + "\n", encoding="utf-8")
    _show(out, "monitor", monitor.markdown(watched))
    print(monitor.markdown(watched))


def demonstrate(out: Path, quick: bool, again: bool) -> list[str]:
    """All but MNIST; what is not as the paper says."""
    instances = load_instances()
    if again:
        new = search(quick)
        (out / "instances.json").write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
        instances = instances if quick else new  # a short search finds only some of them
    found = reproduce(out, quick, instances)
    print(table.markdown(found["table"]))
    for row in found["orders"]:
        print(f"noise multiplier {row['noise_multiplier']:g}: order of convergence {row['order']:.3f}")
    return failures(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="papers.theory", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small scale, written to a temporary folder")
    parser.add_argument("--search", action="store_true", help="search for the instances again")
    parser.add_argument(
        "--mnist",
        action=argparse.BooleanOptionalAction,
        help="only the monitor in a run on MNIST (a few minutes), or all but it (default: all; --quick: all but it)",
    )
    parser.add_argument("--out", type=Path, help="where to write (default: this folder; --quick: a temporary one)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are tiny: threads only wait for each other
    out = args.out or (Path(tempfile.mkdtemp(prefix="theory-")) if args.quick else HERE)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    wrong = [] if args.mnist else demonstrate(out, args.quick, args.search)
    if args.mnist or (args.mnist is None and not args.quick):
        watch(out, args.quick)
    for line in wrong:
        print(f"NOT as the paper says: {line}")
    print(f"written to {out} ({time.perf_counter() - start:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
