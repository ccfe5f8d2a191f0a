"""`clipwise ntk`: what clipping rules make of a network's tangent kernel, and how the loss then moves."""

from __future__ import annotations

import argparse
import ast
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clipwise._extras import need
from clipwise.cli.terminal import add_show_values, table
from clipwise.errors import DataError, InvalidPlan
from clipwise.files import private_folder, replacing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from clipwise.ntk import GradientFlow, Inputs, LossFunction, NTKAnalysis

NAME = "ntk"
HELP = "show what clipping rules do to a network's tangent kernel and to its loss; save spectra and flows"

CLIPS = ("NoClip()", "Abadi(1.0)", "Layerwise(Abadi(1.0))")
OPTIMIZERS = ("gd", "heavy_ball", "nesterov", "adam", "adagrad", "rmsprop")

_EPILOG = """\
SOURCE is a configuration of `clipwise train`, whose network (before training, or with --weights) is looked at on its
first training records; or a function without arguments that returns (model, loss_fn, x, y), where loss_fn(outputs, y)
gives one loss per sample.

examples:
  clipwise ntk examples/digits.toml --samples 20
  clipwise ntk mymodule:make --clip 'Abadi(0.1)' --clip 'Layerwise(Normalize(0.1))' --output ntk/

With --output the folder gets ntk.json, spectrum.svg (of H), clipped.svg (of the symmetric parts of the clipped
matrices) and flow.svg. Everything is computed from the records as they are, without noise: epsilon does not cover it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("source", metavar="SOURCE", help="config.toml, module:function or file.py:function")
    parser.add_argument(
        "--clip", action="append", metavar="RULE", help=f"as in Python; repeatable (default: {', '.join(CLIPS)})"
    )
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="records to use (default: %(default)s)")
    parser.add_argument("--weights", metavar="FILE", help="model.safetensors of a run, for a configuration")
    parser.add_argument(
        "--t-end", type=float, default=1.0, metavar="T", help="length of the flows; 0: none (default: 1)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="gd", help="of the flows (default: %(default)s)")
    parser.add_argument("--output", metavar="FOLDER", help="save figures and ntk.json here (extra plots)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_show_values(parser)


class _Task(NamedTuple):
    model: nn.Module
    loss_fn: LossFunction
    x: Inputs
    y: Any


def parse_clip(text: str) -> Any:
    """A clipping value as Python code writes it; nothing is evaluated.

    >>> parse_clip("Layerwise(Abadi(0.5))")
    Layerwise(rule=Abadi(R=0.5), noise='joint')
    """
    try:
        return _clip(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise InvalidPlan(
            f"--clip {text!r} is not a clipping rule; write it as in Python, such as 'Abadi(1.0)'."
        ) from error


def _clip(node: ast.expr) -> Any:
    import clipwise as cw

    known = (
        *("Abadi", "Automatic", "BatchClip", "Flat", "Global", "GlobalScaled", "Layerwise", "NoClip", "Normalize"),
        "Unclipped",
    )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in known:
            raise InvalidPlan(f"{node.func.id!r} is not a clipping rule; there are: {', '.join(known)}.")
        arguments = [_clip(each) for each in node.args]
        named = {each.arg: _clip(each.value) for each in node.keywords if each.arg}
        return getattr(cw, node.func.id)(*arguments, **named)
    return ast.literal_eval(node) if isinstance(node, ast.Constant) else _no_value()


def _no_value() -> Any:
    raise TypeError("only rules and numbers")


def _from_function(target: tuple[str, str]) -> _Task:
    from torch import nn

    from clipwise.training import guarded, imported

    made = guarded(f"{target[1]}()", imported(*target), reads=True)
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise DataError(f"{target[1]}() must return (model, loss_fn, x, y), with loss_fn(outputs, y).")
    return _Task(*made)


def _from_config(path: str, weights: str | None) -> _Task:
    from torch.nn import functional as F

    from clipwise.training import Config, prepare, read_weights

    job = prepare(Config.load(path))
    if weights is not None:
        read_weights(job.model, weights)
    *inputs, y = job.train.tensors
    x: Inputs = inputs[0] if len(inputs) == 1 else tuple(inputs)
    if job.data.task == "classification":
        return _Task(job.model, lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), x, y)
    return _Task(job.model, lambda outputs, y: (outputs.reshape(len(y)) - y).square(), x, y)


def _load(args: argparse.Namespace) -> _Task:
    """The task in float64, cut to the samples asked for."""
    from torch import Tensor

    from clipwise.ntk import map_inputs
    from clipwise.training import split_target

    target = split_target(args.source)
    if target is not None and args.weights is not None:
        raise DataError("--weights goes with a configuration; a function returns a model with its weights.")
    task = _from_config(args.source, args.weights) if target is None else _from_function(target)
    if args.samples < 1:
        raise DataError(f"--samples must be at least 1, got {args.samples}.")

    def cut(values: Any) -> Any:
        kept = values[: args.samples]
        return kept.double() if isinstance(kept, Tensor) and kept.is_floating_point() else kept

    return _Task(task.model.double(), task.loss_fn, map_inputs(task.x, cut), None if task.y is None else cut(task.y))


def _row(name: str, found: NTKAnalysis, flow: GradientFlow | None) -> dict[str, Any]:
    row = {
        "clip": name,
        "symmetric": found.symmetric,
        "positive_quadratic": found.positive_quadratic,
        "positive_eigenvalues": found.positive_eigenvalues,
        "min_quadratic": found.min_quadratic,
        "min_eigenvalue": found.min_eigenvalue,
        "tolerance": found.tolerance,
        "loss": found.loss,
        "loss_rate": found.loss_rate,
        "fraction_clipped": found.fraction_clipped,
    }
    if flow is not None:
        row["flow"] = {"t": flow.t.tolist(), "loss": flow.loss.tolist(), "loss_rate": flow.loss_rate.tolist()}
    return row


def _print(rows: list[dict[str, Any]], size: tuple[int, int], t_end: float) -> None:
    said = {True: "yes", False: "no"}
    header = ["clipping", "symmetric", "quadratic form >= 0", "eigenvalues >= 0", "least x'Mx", "dL/dt", "clipped"]
    cells = [
        [
            row["clip"],
            *(said[row[name]] for name in ("symmetric", "positive_quadratic", "positive_eigenvalues")),
            f"{row['min_quadratic']:.3g}",
            f"{row['loss_rate']:.4g}",
            f"{row['fraction_clipped']:.0%}",
        ]
        for row in rows
    ]
    if "flow" in rows[0]:
        header.append(f"loss at t = {t_end:g}")
        for row, line in zip(rows, cells, strict=True):
            line.append(f"{row['flow']['loss'][-1]:.4g}")
    n, K = size
    print(f"{n} samples, {K} output(s): kernels of {n * K} rows; loss {rows[0]['loss']:.4g}")
    print(table(header, cells))
    print("M is H, H C or the sum of H_r C_r, with dL/dt = -(dL/df) M (dL/df)'. Not covered by epsilon.")


def _save(
    folder: Path, result: dict[str, Any], H: Tensor, matrices: dict[str, Tensor], flows: dict[str, GradientFlow]
) -> None:
    import torch

    from clipwise import plots

    private_folder(folder)
    result["spectrum"] = torch.linalg.eigvalsh(H).flip(0).tolist()
    result["clipped_spectra"] = {
        name: torch.linalg.eigvalsh((M + M.T) / 2).flip(0).tolist() for name, M in matrices.items()
    }
    figures = {
        "spectrum": plots.spectra({"H": result["spectrum"]}, "Eigenvalues of H"),
        "clipped": plots.spectra(result["clipped_spectra"], "Eigenvalues of the symmetric part of M"),
    }
    if flows:
        figures["flow"] = plots.loss_flows(flows)
    for name, drawn in figures.items():
        with replacing(folder / f"{name}.svg", DataError) as file:
            drawn.savefig(file, format="svg")
    with replacing(folder / "ntk.json", DataError) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())


def run(args: argparse.Namespace) -> int:
    """Analyse, follow the flows, print, save."""
    import clipwise as cw

    if not (math.isfinite(args.t_end) and args.t_end >= 0):
        raise DataError(f"--t-end must be a time, or 0 for no flow, got {args.t_end}.")
    if args.output:
        need("plots", "--output")
    clips = {text: parse_clip(text) for text in args.clip or CLIPS}
    task = _load(args)
    found = {name: cw.ntk.analyse(*task, clip) for name, clip in clips.items()}
    flows: dict[str, Any] = {}
    if args.t_end:
        flows = {name: cw.ntk.gradient_flow(*task, clip, args.t_end, args.optimizer) for name, clip in clips.items()}
    rows = [_row(name, each, flows.get(name)) for name, each in found.items()]
    first = next(iter(found.values()))
    n = len(next(iter([first.factors] if not isinstance(first.factors, dict) else first.factors.values())))
    result = {"source": args.source, "samples": n, "outputs": len(first.matrix) // n, "covered_by_epsilon": False,
              "optimizer": args.optimizer, "rows": rows}  # fmt: skip
    if args.output:
        H = cw.ntk.kernel(task.model, task.x)
        _save(Path(args.output), result, H, {name: each.matrix for name, each in found.items()}, flows)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _print(rows, (n, result["outputs"]), args.t_end)
        if args.output:
            print(f"saved in {args.output}")
    return 0
