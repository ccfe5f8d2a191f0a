"""The SNLI recipe: hidden states that are computed once, the trained part on them, and the whole command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import clipwise as cw
from clipwise.errors import DataError
from papers.snli import frozen
from papers.snli.__main__ import STUDY, main, with_states
from papers.snli.bert import classifier, synthetic_pairs, tokenizer, write_tiny_bert
from papers.snli.frozen import Choice, Hidden, hidden
from papers.snli.network import FromCache, LastLayer
from papers.snli.page import claims

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPWISE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(frozen, "SHARD", 100)
    hidden.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_bert(tmp_path / "bert", layers=3)


def states(folder: Path) -> Hidden:
    hidden.cache_clear()
    return hidden(Choice(str(folder), text="synthetic"))


def files(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.np*")}


@pytest.mark.parametrize("part", ["train", "test"])
def test_cached_states_give_the_logits_of_the_whole_network(folder: Path, part: str) -> None:
    torch.manual_seed(0)
    bert = classifier(folder, 3).eval()
    found = states(folder)
    pairs = getattr(synthetic_pairs(), part)
    tokens = tokenizer(folder)(list(pairs.first), list(pairs.second), padding=True, return_tensors="pt")
    if part == "test":  # kept by length
        order = tokens["attention_mask"].sum(1).argsort(stable=True)
        tokens = {name: value[order] for name, value in tokens.items()}
        assert torch.equal(found.labels["test"], torch.tensor(pairs.labels)[order])
    with torch.no_grad():
        whole = bert(**tokens).logits
        ours = FromCache(LastLayer(bert), found).eval()(found.places[part])
    assert float(whole.std(0).mean()) > 0.05
    torch.testing.assert_close(ours, whole, rtol=0.0, atol=5e-3)  # float16


def test_padding_changes_nothing(folder: Path) -> None:
    found = states(folder)
    model = FromCache(LastLayer(classifier(folder, 3)), found).eval()
    places = found.places["train"][:20]
    assert len(places[:, 2].unique()) > 1
    alone = torch.cat([model(place.unsqueeze(0)) for place in places])
    torch.testing.assert_close(model(places), alone)


def test_every_trained_parameter_gets_the_gradient_of_the_whole_network(folder: Path) -> None:
    found = states(folder)
    bert = classifier(folder, 3).eval()
    top = LastLayer(bert)
    losses = F.cross_entropy(FromCache(top, found)(found.places["train"][:8]), found.labels["train"][:8])
    ours = torch.autograd.grad(losses, list(top.parameters()))
    pairs = synthetic_pairs().train
    tokens = tokenizer(folder)(list(pairs.first[:8]), list(pairs.second[:8]), padding=True, return_tensors="pt")
    loss = F.cross_entropy(bert(**tokens).logits, torch.tensor(pairs.labels[:8]))
    for name, ours_, whole in zip(
        dict(top.named_parameters()), ours, torch.autograd.grad(loss, list(top.parameters())), strict=True
    ):
        torch.testing.assert_close(ours_, whole, rtol=1e-2, atol=1e-4, msg=name)


def test_norms_of_samples_are_those_of_single_gradients(folder: Path) -> None:
    found = states(folder)
    top = LastLayer(classifier(folder, 3)).eval()
    losses = F.cross_entropy(
        FromCache(top, found)(found.places["train"][:6]), found.labels["train"][:6], reduction="none"
    )
    single = [torch.autograd.grad(loss, list(top.parameters()), retain_graph=True) for loss in losses]
    norms = torch.stack([torch.cat([g.flatten() for g in each]).norm() for each in single])
    torch.testing.assert_close(cw.per_sample_norms(losses, dict(top.named_parameters())), norms)


def test_a_stopped_computation_goes_on_and_a_finished_one_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = frozen.states_of

    def stopping(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(frozen, "states_of", stopping)
    with pytest.raises(KeyboardInterrupt):
        states(folder)
    begun = files(tmp_path)
    assert sorted(begun) == ["00000.npy", "00001.npy", "tokens.npz"]
    resumed = states(folder)
    after = files(tmp_path)
    assert len(after) == 5 and begun.items() <= after.items()
    assert calls == 3 + 2, "three shards of 240 training pairs, one of 90 test pairs, one of them tried twice"
    again = states(folder)
    assert calls == 5 and files(tmp_path) == after
    for one, other in zip(resumed.shards, again.shards, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_weights_or_text_have_another_cache(folder: Path, tmp_path: Path) -> None:
    keys = {states(folder).key, states(write_tiny_bert(tmp_path / "other", layers=2)).key}
    hidden.cache_clear()
    keys.add(hidden(Choice(str(folder), text="synthetic", records=200)).key)
    hidden.cache_clear()
    keys.add(hidden(Choice(str(folder), text="synthetic", max_length=8)).key)
    assert len(keys) == 4


def test_a_full_disk_is_told_before_anything_is_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"need 0\.0 GB, but .* has 0\.0 GB left"):
        states(folder)
    assert list(files(tmp_path)) == ["tokens.npz"]


def test_a_cache_is_found_in_any_data_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states(folder)
    before = files(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "clipwise").mkdir(parents=True)
    (tmp_path / "data").rename(tmp_path / "user" / "clipwise" / "data")
    states(folder)
    assert not (tmp_path / "data").exists()
    (tmp_path / "user" / "clipwise" / "data").rename(tmp_path / "data")
    assert files(tmp_path) == before


def test_long_pairs_are_cut(folder: Path) -> None:
    found = hidden(Choice(str(folder), text="synthetic", max_length=8))
    assert int(found.places["train"][:, 2].max()) == 8


def test_a_network_that_is_no_bert_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "bert"', '"model_type": "distilbert"'))
    with pytest.raises(DataError, match="'distilbert'; a BERT"):
        states(folder)


def test_training_is_private_and_separable(folder: Path) -> None:
    found = states(folder)
    model = FromCache(LastLayer(classifier(folder, 3)), found)
    data = found.data()
    plan = cw.Plan(cw.Poisson(len(data.train), 32), steps=3, clip=cw.Abadi(0.1), noise_multiplier=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    def losses(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    private = cw.Private(plan, model, optimizer, seed=0, loss_fn=losses)
    for batch in private.loader(data.train):
        private.step(losses(model, batch))
    assert private.steps_done == 3


def test_other_weights_have_a_folder_of_their_own_and_all_the_pairs(folder: Path) -> None:
    study = with_states(Choice("bert_base"), records=549_367)
    assert study.folder == STUDY.folder / "bert_base" and study.config == STUDY.config
    settings = study.arms[0].overrides
    assert "evaluation.every=934" in settings
    assert 'data.options={weights = "bert_base", text = "snli", max_length = 128}' in settings


@pytest.mark.slow
def test_quick_says_that_its_numbers_mean_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--quick", "--jobs", "1"])
    said = capsys.readouterr().out
    assert "made up by a rule: the numbers show that the code works, and nothing else" in said
    assert said.count("| not private |") >= 2 and "| R = 0.1, then 20 | 1 |" in said
    assert "The paper claims 1.25" in said and "5.131" in said
    assert not (STUDY.folder / "tiny-bert").exists()


def test_why_the_numbers_differ_is_said_of_the_subset_only() -> None:
    assert all(claim.why for claim in claims(None))
    assert not any(claim.why for claim in claims("bert_base")) and len(claims("bert_base")) == len(claims(None))
