"""A seeded resume looked at 64 records, so that a change of record 5 of 2,000 went unseen; and its digest told.

A digest of data is an exact membership oracle: whoever has it and guesses the data knows. It lay in the checkpoint, in
result.json and on the page.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import clipwise as cw
from clipwise import report
from clipwise.accounting import account
from clipwise.data import DataSet
from clipwise.hashing import digest_of, whole
from clipwise.private.digests import Digests, file_of
from clipwise.report import render
from clipwise.sampling import Sampling
from clipwise.training import train
from clipwise.training.run import train as train_module
from tests.training.common import config, exact_panel

N, STEPS = 200, 6


def tensors(changed: int | None = None) -> TensorDataset:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    if changed is not None:
        x[changed, 1] += 1e-3
    return TensorDataset(x, x.sum(1))


class Files(Dataset[Any]):
    """Records that are read one by one, with a random augmentation if asked for."""

    def __init__(self, changed: int | None = None, noise: str = "") -> None:
        self._records, self._noise, self.reads = tensors(changed), noise, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        x, y = self._records[index]
        if self._noise == "seeded":
            x = x + 0.01 * torch.rand(3) + 0.01 * float(np.random.rand())  # noqa: NPY002
        elif self._noise == "own":
            x = x + 0.01 * float(np.random.default_rng().random())
        return x, y


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def go(private: cw.Private, model: nn.Module, dataset: Dataset[Any], until: int = STEPS, **options: Any) -> None:
    for x, y in private.loader(dataset, **options):
        private.step((model(x).squeeze(1) - y).square())
        if private.steps_done >= until:
            return


def begun(path: Path, dataset: Dataset[Any], rate: int = N // 2, **options: Any) -> tuple[cw.Private, nn.Module]:
    """A seeded run that is saved after two steps, and makes one more."""
    plan = cw.Plan(cw.Poisson(N, rate), STEPS, cw.Abadi(1.0), noise_multiplier=1.0)
    model, optimizer = fresh()
    private = cw.Private(plan, model, optimizer, seed=0)
    go(private, model, dataset, until=2, **options)
    private.save(path)
    go(private, model, dataset, until=3, **options)
    return private, model


def resumed(path: Path) -> tuple[cw.Private, nn.Module]:
    model, optimizer = fresh()
    return cw.Private.resume(path, model, optimizer), model


@pytest.mark.parametrize("changed", [0, 5, N - 1])
@pytest.mark.parametrize("kind", ["tensors", "subset"])
def test_any_record_in_memory_that_changed_is_noticed_at_once(kind: str, changed: int, tmp_path: Path) -> None:
    def of(records: TensorDataset) -> Dataset[Any]:
        return records if kind == "tensors" else Subset(records, range(N))

    begun(tmp_path / "run", of(tensors()))
    private, model = resumed(tmp_path / "run")
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        private.loader(of(tensors(changed)))
    assert private.looked.state == "changed" and private.ledger.steps == 2
    private, model = resumed(tmp_path / "run")
    go(private, model, of(tensors()))
    assert str(private.looked) == "data unchanged"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("noise", ["", "seeded"])
def test_any_record_that_was_drawn_and_changed_is_noticed_when_it_is_drawn_again(
    noise: str, workers: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"physical_batch_size": 40, "num_workers": workers}
    whole_run, _ = begun(tmp_path / "run", Files(noise=noise), rate=N - 5, **options)
    drawn = set(whole_run._position.digests._records)
    assert len(drawn) > N - 20 and whole_run.looked.unsteady == 0
    private, model = resumed(tmp_path / "run")
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        go(private, model, Files(changed=max(drawn), noise=noise), **options)
    assert private.looked.state == "changed"
    private, model = resumed(tmp_path / "run")
    go(private, model, Files(noise=noise), **options)
    assert private.ledger.events == private.plan.events and private.looked.state == "unchanged"


def test_records_that_do_not_read_the_same_twice_are_counted(tmp_path: Path) -> None:
    private, _ = begun(tmp_path / "run", Files(noise="own"))
    assert private.looked.unsteady == private.looked.records > 100
    private, model = resumed(tmp_path / "run")
    go(private, model, Files(noise="own", changed=5))  # nothing can be said of them
    assert private.looked.unsteady == private.looked.records


@pytest.mark.parametrize(("noise", "more"), [("", 1), ("seeded", 2)])
def test_a_record_is_read_once_more_when_it_is_first_drawn(noise: str, more: int) -> None:
    dataset = Files(noise=noise)
    model, optimizer = fresh()
    plan = cw.Plan(cw.FullBatch(N), 20, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, optimizer, seed=0)
    loader = private.loader(dataset)
    dataset.reads = 0
    next(iter(loader))
    first, dataset.reads = dataset.reads, 0
    next(iter(loader))
    assert first == dataset.reads + more * N


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    for kind in (tensors(), Files(), Files(noise="seeded")):
        private, model = begun(tmp_path / "run", kind)
        go(private, model, kind)
        again, other = resumed(tmp_path / "run")
        go(again, other, kind)
        assert torch.equal(model.weight, other.weight) and again.ledger.events == private.plan.events  # type: ignore[arg-type]


def test_a_step_that_is_repeated_with_other_sums_is_charged_again(tmp_path: Path) -> None:
    """Batches of one's own, of which nothing can be seen: other data draw other noise, and that is a second release."""
    x, y = tensors().tensors

    def step(private: cw.Private, model: nn.Module, scale: float = 1.0) -> Tensor:
        private.step((model(scale * x).squeeze(1) - y).square())
        return model.weight.detach().clone()  # type: ignore[operator, no-any-return]

    plan = cw.Plan(cw.FullBatch(N), STEPS, cw.Abadi(1.0), noise_multiplier=1.0)
    model, optimizer = fresh()
    private = cw.Private(plan, model, optimizer, seed=0, own_batches=True)
    step(private, model)
    private.save(tmp_path / "run")
    expected = step(private, model)
    private, model = resumed(tmp_path / "run")
    assert torch.equal(step(private, model), expected) and private.ledger.steps == 2  # the same release
    private, model = resumed(tmp_path / "run")
    other = step(private, model, scale=1.001)
    assert float((other - expected).abs().max()) > 1e-4  # not the same noise on another sum
    assert [(e.steps, e.reason) for e in private.ledger.events] == [(2, "training"), (1, "repeated")]  # type: ignore[union-attr]
    # What a process released that died is charged in the next one.
    for scale, charged in ((1.001, 3), (1.0, 3), (1.002, 4)):
        private, model = resumed(tmp_path / "run")
        step(private, model, scale)
        assert private.ledger.steps == charged


def test_without_its_file_nothing_is_said_of_the_data(tmp_path: Path) -> None:
    begun(tmp_path / "run", tensors())
    file_of(tmp_path / "run").unlink()
    private, model = resumed(tmp_path / "run")
    go(private, model, tensors())
    assert private.looked.state == "not compared"
    begun(tmp_path / "run", tensors())
    good = file_of(tmp_path / "run").read_bytes()
    for bad in (b"", b"{}\n", good[:20], good.replace(b'"version": 1', b'"version": 9')):
        file_of(tmp_path / "run").write_bytes(bad)
        with pytest.raises(cw.CheckpointError, match="damaged"):
            resumed(tmp_path / "run")


def test_an_entry_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    begun(tmp_path / "run", Files())
    path = file_of(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:-7])
    private, model = resumed(tmp_path / "run")
    go(private, model, Files())
    again = Digests()
    again.load(tmp_path / "run")
    assert again.looked.records > 100


def test_data_of_which_nothing_was_read_were_not_looked_at() -> None:
    digests = Digests()
    digests.note({})
    assert digests.looked.state == "not compared"
    digests.note({3: b"x" * 16})
    assert digests.looked.state == "unchanged"


# Where the digest lies


def oracles(data: DataSet) -> list[bytes]:
    """What whoever guesses the data right can compute."""
    found = [whole(data.train), whole(data.test), bytes.fromhex(data.fingerprint), *map(digest_of, data.train)]
    return [digest for digest in found if digest is not None]


def holders(folder: Path, secrets: list[bytes]) -> dict[str, Path]:
    """The files that hold a digest, in whatever form."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(secret[:8] in content or secret.hex()[:16].encode() in content for secret in secrets):
            found[path.name] = path
    return found


class Stop(Exception):
    pass


def test_the_digest_is_in_its_own_files_and_in_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "guarantees_of", exact_panel)
    for drawings in ("public_drawings", "private_drawings"):  # curves of metrics, which take seconds
        monkeypatch.setattr(render, drawings, lambda arms: [])
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    parts = TensorDataset(x, (x[:, 0] > 0).long()), TensorDataset(x[:20], (x[:20, 0] > 0).long())
    mine = DataSet("mine", "classification", *parts, classes=("no", "yes"))
    secrets, made = oracles(mine), config("batch_size=20", "steps=8", "clip.R=1.0", "checkpoint_every=2")

    def stop(progress: Any) -> None:
        if progress.step == 5:
            raise Stop

    with pytest.raises(Stop):
        train(made, output=tmp_path / "run", data=mine, watch=stop)
    found = holders(tmp_path, secrets)
    assert set(found) == {"checkpoint.digests", "data.digest"}
    assert stat.S_IMODE(found["checkpoint.digests"].stat().st_mode) == 0o600
    changed = DataSet("mine", "classification", TensorDataset(x + 1, parts[0].tensors[1]), parts[1], ("no", "yes"))
    with pytest.raises(cw.CheckpointError, match="the data changed") as refused:
        train(made, output=tmp_path / "run", data=changed, resume=True)
    assert not any(secret.hex()[:8] in str(refused.value) for secret in [*secrets, *oracles(changed)])
    run, _ = train(made, output=tmp_path / "run", data=mine, resume=True)
    report.write([run], tmp_path / "all")
    report.write([run], tmp_path / "publishable", publishable=True)
    found = holders(tmp_path, secrets)
    assert set(found) == {"data.digest"} and stat.S_IMODE(found["data.digest"].stat().st_mode) == 0o600
    said = f"{capsys.readouterr()} {run} {run.publishable()} {json.dumps(run.to_dict())}"
    assert not any(secret.hex()[:8] in said for secret in secrets)
    assert run.provenance["data"]["since_the_start"] == "unchanged"
    assert "since the start" in (tmp_path / "all" / "report.html").read_text()


def test_neither_checkpoint_nor_state_tells_the_data(tmp_path: Path) -> None:
    """Whoever has the seed must not learn the data from what is written: runs on other data write the same."""
    for sampling in (cw.FullBatch(N), cw.Shuffled(N, 50), cw.BallsInBins(N, 50)):
        states = []
        for changed in (None, 5):
            model, optimizer = fresh()
            plan = cw.Plan(sampling, STEPS, cw.Abadi(1.0), noise_multiplier=1.0)
            private = cw.Private(plan, model, optimizer, seed=0)
            private.loader(tensors(changed))
            state = private.state_dict()
            states.append({key: value for key, value in state.items() if key not in ("generator", "ledger")})
        assert states[0] == states[1]
    secrets = [found for found in [whole(tensors()), *map(digest_of, tensors())] if found is not None]
    begun(tmp_path / "run", tensors())
    assert set(holders(tmp_path, secrets)) == {"run.digests"}


def test_an_unseeded_run_leaves_no_digest(tmp_path: Path) -> None:
    begun(tmp_path / "run", tensors())
    assert file_of(tmp_path / "run").exists()
    model, optimizer = fresh()
    private = cw.Private(cw.Plan(cw.FullBatch(N), STEPS, cw.Abadi(1.0), 1.0), model, optimizer)
    go(private, model, tensors(), until=1)
    private.save(tmp_path / "run")
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == [".run.lock", "run"]
        and private.looked.state == "not compared"
    )


@pytest.mark.parametrize("rate", [0.01, 0.2])
@pytest.mark.parametrize("times", [2, 4])
def test_a_step_that_is_made_again_has_the_coins_of_the_first_time(rate: float, times: int) -> None:
    """A batch is drawn once, however often it is released: one sampled step with less noise, not several draws."""
    once = cw.GaussianSteps(cw.Poisson(1_000, 1_000 * rate), noise_multiplier=1.0)
    truth = account([once.changed(noise_multiplier=times**-0.5)], 1e-3).epsilon
    assert account([once.repeated(times)], 1e-3).epsilon < truth  # as it was charged
    assert account([once, once.on_the_same_batch(times - 1)], 1e-3).epsilon >= truth


@pytest.mark.parametrize(
    ("sampling", "expected", "noise"),
    [
        (cw.Poisson(40, 5), cw.FullBatch(40), 2.0),
        (cw.Shuffled(40, 5), cw.FullBatch(40), 2.0),
        (cw.FixedSize(40, 5), cw.FullBatch(40), 2.0),
        (cw.Poisson(40, 5, max_batch_size=9), cw.FullBatch(40), 2.0),
        (cw.Poisson(rate=0.1, batch_size=5), cw.Poisson(rate=1.0, batch_size=5), 2.0),
        (cw.Poisson(rate=0.1, batch_size=5, max_batch_size=9, largest=50), cw.Poisson(rate=1.0, batch_size=5), 1.0),
    ],
    ids=repr,
)
def test_a_batch_that_was_drawn_before_is_charged_in_full(sampling: Sampling, expected: Sampling, noise: float) -> None:
    again = cw.GaussianSteps(sampling, 2.0, 7, own_batches=True).on_the_same_batch(3)
    assert (again.sampling, again.noise_multiplier, again.count) == (expected, noise, 3) and again.own_batches
