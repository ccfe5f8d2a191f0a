"""What is measured of a row: exactness against a loop, whether samples meet, and a plain private training loop."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import ClipwiseError
from tests.engine.reference import (
    clipped_loop,
    flat,
    flat_sum,
    loop_gradients,
    norms_of,
    relative_errors,
    rounds_inside,
)

from .row import Row

BATCHES = (4, 1, 3)
RECORDS, EXPECTED, STEPS = 24, 6, 3
MEETS = 1e-4  # rounding stays far below this, other people's data far above

Result = dict[str, Any]


def measure(row: Row) -> Result:
    """Everything about one row, as JSON. `status` sums it up."""
    start = time.perf_counter()
    result: Result = {"package": row.package, "mixes": row.mixes}
    dtype = torch.float32 if row.single else torch.float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = row.model(dtype)
            result["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
            result["dtype"] = str(dtype).removeprefix("torch.")
            result["moved_by_others"] = moved_by_others(row, model, dtype)
            result["moved_by_earlier"], result["written_from_data"] = moved_by_earlier(row, model, dtype)
        except Exception as error:
            return result | {"status": "broken row", "message": say(error)}
        result["engine"] = engine(row, model, dtype)
        result["private"] = private(row)
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result | {"status": status(result)}


def status(result: Result) -> str:
    """One or two words for a row."""
    meets = max(result["moved_by_others"], result["moved_by_earlier"]) > MEETS
    if meets != bool(result["mixes"]):
        return "label wrong"
    outcomes = [result["engine"]["outcome"], result["private"]["outcome"]]
    for bad in ("wrong", "crash"):
        if bad in outcomes:
            return bad
    if meets:  # what counts is the user's loop
        return f"mixing, {result['private']['outcome']}"
    return "refused" if "refused" in outcomes else "exact"


def moved_by_others(row: Row, model: nn.Module, dtype: torch.dtype) -> float:
    """How far a sample's loss or gradient moves, relative to itself, when all others of its batch are replaced."""
    size = BATCHES[0]
    mine, others = row.draw(size, dtype), row.draw(size, dtype, seed=1)
    before = lone_gradients(row, model, mine, range(size))
    after = []
    for k in range(size):
        company = [*others[:k], mine[k], *others[k + 1 :]]
        after += lone_gradients(row, model, company, [k])
    return farthest(before, after)


def moved_by_earlier(row: Row, model: nn.Module, dtype: torch.dtype) -> tuple[float, list[str]]:
    """How far losses or gradients move when an earlier batch is replaced, and the weights and buffers that hold it."""
    seen, states = [], []
    for seed in (1, 2):
        fresh = copy.deepcopy(model)
        torch.manual_seed(3)
        with torch.no_grad():  # models may keep what they computed, and a graph cannot be used twice
            row.losses(fresh, row.collate(row.draw(BATCHES[0], dtype, seed)))
        tensors = [*fresh.named_parameters(), *fresh.named_buffers()]
        states.append({name: t.detach().clone().nan_to_num() for name, t in tensors})
        seen.append(lone_gradients(row, fresh, row.draw(BATCHES[0], dtype), range(BATCHES[0]), copied=False))
    first, second = states
    shared = [name for name in first if name in second and first[name].shape == second[name].shape]
    written = [name for name in shared if not torch.equal(first[name], second[name])]
    return farthest(*seen), written[:3]


def farthest(before: list[tuple[Tensor, Tensor]], after: list[tuple[Tensor, Tensor]]) -> float:
    """The largest relative change of a loss or a gradient."""
    found = 0.0
    for (old_loss, old), (loss, gradient) in zip(before, after, strict=True):
        assert gradient.isfinite().all(), "gradients that are not finite"
        assert old.norm() > 1e-12, "a gradient of zero shows nothing"
        found = max(found, float((gradient - old).norm() / old.norm()))
        found = max(found, float((loss - old_loss).abs() / old_loss.abs().clamp(min=1e-3)))
    return float(f"{found:.2g}")


def lone_gradients(
    row: Row, model: nn.Module, records: list[Any], places: Iterable[int], copied: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Loss and flat gradient of the samples at `places`, on a copy of the model and from the same random numbers."""
    fresh = copy.deepcopy(model) if copied else model
    leaves = trainable(fresh)
    torch.manual_seed(3)
    losses = row.losses(fresh, row.collate(copy.deepcopy(records)))
    assert losses.isfinite().all(), "losses that are not finite"
    assert losses.shape == (len(records),), f"losses of shape {tuple(losses.shape)} for {len(records)} records"
    found = []
    for k in places:
        gradient = loop_gradients(losses[k : k + 1], leaves)
        found.append((losses[k].detach().double(), flat(gradient)[0]))
    return found


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def engine(row: Row, model: nn.Module, dtype: torch.dtype) -> Result:
    """Norms and clipped sum against the loop, for several batch sizes in a row on one model."""
    worst, parts = 0.0, {}
    for batch in BATCHES:
        torch.manual_seed(batch)
        try:
            losses = row.losses(model, row.collate(row.draw(batch, dtype)))
        except Exception:
            continue  # the model itself takes no batch of this size, as BatchNorm takes none of one
        try:
            error, limit = distance(model, losses, dtype)
        except Exception as failure:
            outcome = "refused" if isinstance(failure, ClipwiseError) else "crash"
            parts[batch] = (outcome, say(failure))
            continue
        worst = max(worst, error)
        parts[batch] = ("exact", "") if error <= limit else ("wrong", f"off by {error:.1e} of the gradient norm")
    result: Result = {"outcome": "exact", "error": float(f"{worst:.2g}")}
    for outcome in ("refused", "crash", "wrong"):
        found = {batch: text for batch, (kind, text) in parts.items() if kind == outcome}
        if found:
            batch, text = next(iter(found.items()))
            sizes = "" if len(found) == len(parts) else f"B={','.join(map(str, found))}: "
            result |= {"outcome": outcome, "message": f"{sizes}{text}"}
    return result


def distance(model: nn.Module, losses: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest relative error of norms and clipped sum, and what rounding allows."""
    params = trainable(model)
    limit = 1e-4 if dtype == torch.float32 else 1e-5 if rounds_inside(losses) else 1e-8
    loop = loop_gradients(losses, params)
    norms = norms_of(loop)
    style = cw.Flat(cw.Abadi(float(norms.median()) or 1.0))
    expected = flat(clipped_loop(loop, style))
    clipped = cw.clipped_gradients(losses, params, style)
    of_norms = relative_errors(clipped.norms, norms, norms, dtype).max()
    scale = expected.norm(dim=1).sum()[None]
    of_sum = relative_errors(flat_sum(clipped.gradients)[None], expected.sum(0)[None], scale, dtype).max()
    error = max(float(of_norms), float(of_sum))
    return (float("inf") if error != error else error), limit


def private(row: Row) -> Result:
    """A plain float32 loop of a few private steps, as a user writes it, without `loss_fn`."""
    model = row.model(torch.float32)
    dataset = row.draw(RECORDS, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = cw.Plan(sampling=cw.Poisson(RECORDS, EXPECTED), steps=STEPS, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    done = 0
    try:
        run = cw.Private(plan, model, optimizer, seed=1)
        for batch in run.loader(dataset, collate_fn=row.collate):
            run.step(row.losses(model, batch))
            done += 1
    except ClipwiseError as error:
        return {"outcome": "refused", "steps": done, "message": say(error)}
    except Exception as error:
        return {"outcome": "crash", "steps": done, "message": say(error)}
    return {"outcome": "accepted", "steps": done}


def say(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
