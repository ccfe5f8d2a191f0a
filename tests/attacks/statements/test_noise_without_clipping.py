"""Noise without clipping protects nobody: every route by which it could get a finite epsilon is tried.

`Unclipped` looks like a private rule: it adds Gaussian noise, through the same release. Nothing bounds what a record
contributes, so no number of any kind may be stated for it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.accounting import ACCOUNTANTS
from clipwise.cli.main import main
from clipwise.clipping import Style, own_noise
from clipwise.errors import ClipwiseError, DataError, InvalidPlan
from clipwise.federated import Reply, Server
from clipwise.mechanisms import ProjectedNorms, Rounds
from clipwise.report import Run, arms_of, card
from clipwise.report.warnings import warnings_of
from clipwise.training import Config, train

N, BATCH, STD = 40, 10, 3.0
UNCLIPPED = [
    cw.Unclipped(STD),
    cw.Flat(cw.Unclipped(STD)),
    cw.Layerwise(cw.Unclipped(STD)),
    cw.Layerwise(cw.Unclipped(STD), noise="per_layer"),
    cw.Layerwise({"0": cw.Unclipped(STD), "2": cw.Unclipped(2 * STD)}),
    cw.Groupwise({"0.*": cw.Unclipped(STD), "*": cw.Unclipped(STD)}),
    cw.MixUp(small=cw.Abadi(1.0), large=cw.Unclipped(STD), switch_at=0.5),
    cw.MixUp(small=cw.Unclipped(STD), large=cw.Abadi(1.0), switch_at=5),
]
USED = UNCLIPPED[:4]


def records() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 2))


def plan(**changes: Any) -> cw.Plan:
    fields = {"sampling": cw.Poisson(N, BATCH), "steps": 6, "clip": cw.Unclipped(STD), "noise_multiplier": 0.0}
    return cw.Plan(**{**fields, **changes})


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def loop(made: cw.Plan, seed: int | None = 1) -> tuple[cw.Private, nn.Module]:
    model = network()
    private = cw.Private(made, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)
    for x, y in private.loader(records()):
        private.step(losses(model, x, y))
    return private, model


def judged(model: nn.Module) -> Any:
    x, y = records().tensors
    return cw.calibration.evaluate(logits=model(x).detach(), labels=y)


# What the noise is


@pytest.mark.parametrize("clip", USED, ids=str)
def test_the_noise_is_that_of_a_private_run_with_the_same_sigma_times_r(clip: Any) -> None:
    """On the sum, by the one release function: the same seed, sums and deviation make the same numbers."""
    x, y = records().tensors
    made = {}
    for name, own in (
        ("unclipped", plan(clip=clip)),
        ("private", plan(clip=cw.Abadi(1e6), noise_multiplier=STD / 1e6)),
    ):
        model = network()
        private = cw.Private(
            replace(own, sampling=cw.FullBatch(N)), model, torch.optim.SGD(model.parameters(), lr=0.0), seed=7,
            own_batches=True,
        )  # fmt: skip
        clean = torch.autograd.grad(losses(model, x, y).sum() / N, list(model.parameters()))
        private.backward(losses(model, x, y))
        assert private.release()
        made[name] = torch.cat([(p.grad - c).reshape(-1) for p, c in zip(model.parameters(), clean, strict=True)])
    # 2,402 weights: the deviation of a deviation is 1.4 %.
    assert float(made["unclipped"].std()) == pytest.approx(STD / N, rel=0.06)
    assert float(made["private"].std()) == pytest.approx(STD / N, rel=0.06)
    grid = 2.0 ** math.floor(math.log2(STD / N)) / 1024
    for p in private.model.parameters():
        assert p.grad is not None and bool((p.grad / grid == (p.grad / grid).round()).all())


def test_each_group_has_its_own_noise_and_a_mix_up_has_it_when_its_turn_comes() -> None:
    clip = cw.Layerwise({"0": cw.Unclipped(STD), "2": cw.Unclipped(20 * STD)})
    for made, expected in (
        (plan(clip=clip), [(STD, 20 * STD)] * 6),
        (plan(clip=cw.MixUp(cw.Global(1e6), clip, switch_at=4)), [(0.0, 0.0)] * 4 + [(STD, 20 * STD)] * 2),
    ):
        model, found = network(), []
        private = cw.Private(made, model, torch.optim.SGD(model.parameters(), lr=0.0), seed=1, own_batches=True)
        x, y = (t[:BATCH] for t in records().tensors)
        clean = torch.autograd.grad(losses(model, x, y).sum() / BATCH, list(model.parameters()))
        for _ in range(6):
            private.backward(losses(model, x, y))
            private.release()
            spread = [p.grad - c for p, c in zip(model.parameters(), clean, strict=True)]
            found.append([float(spread[k].std()) * BATCH for k in (0, 2)])
        assert torch.tensor(found).tolist() == [pytest.approx(each, rel=0.1, abs=1e-4) for each in expected]
        assert private.epsilon(1e-5) == math.inf


def test_a_seeded_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole, end = loop(plan())
    model = network()
    private = cw.Private(plan(), model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
    for x, y in private.loader(records()):
        private.step(losses(model, x, y))
        if private.steps_done == 3:
            private.save(tmp_path / "run.ckpt")
            break
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.Private.resume(tmp_path / "run.ckpt", model, optimizer)
    for x, y in private.loader(records()):
        private.step(losses(model, x, y))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), end.parameters(), strict=True))
    assert private.ledger == whole.ledger and private.epsilon(1e-5) == math.inf
    with pytest.raises(ClipwiseError):  # and it cannot go on as a private one
        cw.Private.resume(
            tmp_path / "run.ckpt", network(), optimizer, plan=plan(clip=cw.Abadi(1.0), noise_multiplier=9.0)
        )


# No plan


@pytest.mark.parametrize("clip", UNCLIPPED, ids=str)
@pytest.mark.parametrize("noise", [1e-6, 1.0, 1e6, cw.Steps({0: 2.0, 3: 1.0}), cw.Steps({0: 2.0})], ids=str)
def test_it_goes_with_no_noise_multiplier(clip: Any, noise: Any) -> None:
    with pytest.raises(InvalidPlan, match="does not bound"):
        plan(clip=clip, noise_multiplier=noise)
    for mechanism in (Rounds(), ProjectedNorms(50)):
        with pytest.raises(InvalidPlan):
            plan(clip=clip, noise_multiplier=noise, mechanism=mechanism)


@pytest.mark.parametrize("clip", UNCLIPPED, ids=str)
def test_no_noise_is_found_for_it_and_no_accountant_has_a_number(clip: Any) -> None:
    for noise in (0.0, None, cw.Steps({0: 0.0})):
        made = plan(clip=clip, noise_multiplier=noise)
        assert not made.is_private
        with pytest.raises(InvalidPlan, match="private"):
            made.calibrate(epsilon=1e6, delta=0.9)
        assert "not private" in dict(made.rows())["noise multiplier" if noise is None else "epsilon"]
    made = plan(clip=clip)
    assert made.epsilon(1e-5) == math.inf and made.epsilon(0.9) == math.inf
    for name in ACCOUNTANTS:
        assert made.epsilon(1e-5, name) == math.inf
        assert cw.Ledger(made.events).guarantee(1e-5, name).epsilon == math.inf
    if isinstance(clip, cw.Unclipped):
        assert plan(clip=clip, mechanism=ProjectedNorms(50)).epsilon(1e-5) == math.inf
    written = json.loads(json.dumps(made.to_dict()))
    assert cw.Plan.from_dict(written) == made
    with pytest.raises(InvalidPlan, match="does not bound"):
        cw.Plan.from_dict({**written, "noise_multiplier": 1.0})


def test_a_style_has_it_for_all_groups_or_for_none() -> None:
    """Else weights without noise stand beside others that have it, and the run looks noisier than it is."""
    for other in (cw.Abadi(1.0), cw.NoClip(), cw.BatchClip(1.0)):
        for make in (cw.Layerwise, cw.Groupwise):
            with pytest.raises(InvalidPlan, match="for all groups"):
                make({"0": cw.Unclipped(STD), "*": other})


def test_it_states_no_finite_bound() -> None:
    @dataclass(frozen=True)
    class Bounded(cw.Unclipped):
        @property
        def sensitivity(self) -> float:
            return 1.0

    with pytest.raises(InvalidPlan, match="times the sensitivity it states"):
        plan(clip=Bounded(STD), noise_multiplier=1.0)
    assert own_noise(cw.Flat(cw.Abadi(1.0))) == {} and cw.Unclipped(STD).sensitivity == math.inf


@dataclass(frozen=True)
class Hidden:
    """A schedule that clips at both ends, where a plan looks."""

    def at(self, step: int, steps: int) -> Style:
        return cw.Flat(cw.Unclipped(STD) if step == 2 else cw.Abadi(1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.0}, "does not bound"),
        (
            {"noise_multiplier": 0.0, "sampling": cw.CyclicPoisson(N, BATCH, 2), "correlation": cw.Banded(2)},
            "is not correlated",
        ),
    ],
    ids=["private", "correlated"],
)
def test_a_schedule_that_hides_it_is_stopped_before_the_step(changes: dict[str, Any], message: str) -> None:
    model = network()
    private = cw.Private(plan(clip=Hidden(), **changes), model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
    made = 0
    for x, y in private.loader(records()):
        if private.steps_done < 2:
            made += private.step(losses(model, x, y))
            continue
        with pytest.raises(InvalidPlan, match=message):
            private.step(losses(model, x, y))
        break
    assert made == 2
    assert private.ledger.steps == 2


@pytest.mark.parametrize("clip", UNCLIPPED, ids=str)
def test_its_noise_is_not_correlated(clip: Any) -> None:
    with pytest.raises(InvalidPlan, match="is not correlated"):
        plan(clip=clip, sampling=cw.CyclicPoisson(N, BATCH, 2), correlation=cw.Banded(2))
    with pytest.raises(InvalidPlan, match="is not correlated"):
        plan(clip=clip, sampling=cw.Shuffled(N, BATCH), correlation=cw.Tree())


@pytest.mark.parametrize("kind", [cw.optim.Langevin, cw.optim.SGNHT])
def test_no_chain_samples_with_it(kind: Any) -> None:
    for clip in USED:
        with pytest.raises(InvalidPlan, match="does not bound"):
            kind(cw.Poisson(N, BATCH), 6, clip, 0.01, momentum=0.5)


# No ledger, no run, no page


@pytest.mark.parametrize("clip", [USED[0], USED[2], UNCLIPPED[-2]], ids=str)
def test_a_run_has_no_epsilon_and_every_page_says_so(clip: Any, tmp_path: Path) -> None:
    private, model = loop(plan(clip=clip))
    assert private.epsilon(1e-5) == math.inf
    assert cw.Ledger.from_json(private.ledger.to_json()).epsilon(0.5) == math.inf
    panel = cw.privacy_panel(private.ledger, 1e-5)
    assert {each.epsilon for each in panel.values()} == {math.inf}
    assert "nothing is private" in " ".join(panel["exact"].warnings)
    for delta in (None, 1e-5):
        run = Run.of(private, judged(model), delta=delta, name="noise alone")
        assert not run.is_private and not Run.load(run.save(tmp_path / str(delta))).is_private
        said = " ".join(each.text for each in warnings_of(arms_of([run])))
        assert "Trained with noise on gradients that nothing clips: no epsilon holds for it" in said
        assert "**Not private.** Trained with noise on gradients that nothing clips" in card(run)
        page = cw.report.write(run, tmp_path / f"page{delta}").read_text(encoding="utf-8")
        for text in (page, card(run), said):
            assert not re.search(r"epsilon\s*(=|of|is)?\s*[0-9]", text) and "differential privacy by" not in text
        assert arms_of([run])[0].epsilon is None and arms_of([run])[0].epsilon_text == "not private"


def test_beside_private_runs_the_joint_epsilon_is_theirs_alone_and_the_page_says_so() -> None:
    unclipped, model = loop(plan())
    private, other = loop(plan(clip=cw.Abadi(1.0), noise_multiplier=9.0), seed=2)
    runs = [
        Run.of(unclipped, judged(model), delta=None, name="noise alone"),
        Run.of(private, judged(other), delta=1e-4, name="private"),
    ]
    said = {each.text: each.arms for each in warnings_of(arms_of(runs))}
    (of,) = [arms for text, arms in said.items() if text.startswith("Trained with noise on gradients")]
    assert of == ("noise alone",)
    assert arms_of(runs)[0].epsilon_text == "not private"


def test_a_ledger_of_other_steps_does_not_make_it_private(tmp_path: Path) -> None:
    """A run put together by hand, or from an edited result.json: its plan says what was clipped."""
    private, model = loop(plan(clip=cw.Abadi(1.0), noise_multiplier=9.0))
    run = Run.of(private, judged(model), delta=1e-4, name="edited")
    assert run.is_private
    record = run.to_dict()["plan"]
    written = {**record, "clip": {"kind": "Flat", "rule": {"kind": "Unclipped", "noise_std": STD}}}
    for other in (*(plan(clip=clip) for clip in UNCLIPPED), cw.report.WrittenPlan(written), plan(clip=cw.NoClip())):
        with pytest.raises(DataError, match="which bounds nothing, and an epsilon"):
            replace(run, plan=other)
        bare = replace(run, plan=other, guarantees={})
        assert not bare.is_private and "**Not private.**" in card(bare)
    folder = run.save(tmp_path)
    saved = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(json.dumps({**saved, "plan": written}), encoding="utf-8")
    with pytest.raises(DataError):
        Run.load(folder)


# From a configuration


CONFIG = f"""
name = "noise-alone"
seed = 3
steps = 4
batch_size = 64
data.source = "digits"
model = {{ source = "mlp", hidden = [8] }}
clip = {{ rule = "Unclipped", noise_std = {STD} }}
optimizer.learning_rate = 0.1
privacy.private = false
evaluation = {{ every = 2, resamples = 0 }}
"""


def test_clipwise_train_says_not_private_and_nothing_continues_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "run.toml").write_text(CONFIG, encoding="utf-8")
    assert main(["train", str(tmp_path / "run.toml"), "--output", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "Trained with noise on gradients that nothing clips: no epsilon holds for it" in out
    assert "differential privacy by" not in out and not re.search(r"epsilon\s*(=|of|is)?\s*[0-9]", out)
    assert {row["epsilon"] for row in Run.load(tmp_path / "run").curves} == {None}
    plain, _ = train(
        Config.parse(CONFIG, "plain.toml", ("clip={rule='NoClip'}",)), output=tmp_path / "plain", page=False
    )
    assert plain.test != Run.load(tmp_path / "run").test  # there was noise
    private = ("privacy={noise_multiplier=4.0}", "clip={rule='Abadi', R=1.0}")
    for changes in (private, ("privacy={epsilon=3.0}", "clip={rule='Abadi', R=1.0}")):
        with pytest.raises(ClipwiseError, match="not private: nothing that begins with its weights"):
            train(
                Config.parse(CONFIG, "next.toml", (*changes, f"continue_from='{tmp_path / 'run'}'")),
                output=tmp_path / "next",
            )
        with pytest.raises(ClipwiseError, match="nothing protects them any more"):
            train(
                Config.parse(CONFIG, "next.toml", (*changes, f"model.weights='{tmp_path / 'run'}'")),
                output=tmp_path / "next",
            )
    train(Config.parse(CONFIG, "first.toml", private), output=tmp_path / "first", page=False)
    with pytest.raises(ClipwiseError, match="needs noise"):
        train(Config.parse(CONFIG, "next.toml", (f"continue_from='{tmp_path / 'first'}'",)), output=tmp_path / "next")
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("privacy={epsilon=3.0}",), "no noise that makes"),
        (("privacy={noise_multiplier=1.0}",), "does not bound"),
        (("privacy={noise_multiplier={0=2.0, 2=1.0}}",), "does not bound"),
        (("privacy={noise_multiplier={0=2.0, 2=1.0}, epsilon=3.0}",), "does not bound"),
        (("clip={schedule='MixUp', switch_at=0.5, small={rule='Abadi', R=1}, large={rule='Unclipped', noise_std=1}}",
          "privacy={epsilon=3.0}"), "no noise that makes"),
        (("clip={rule='Unclipped'}",), "noise_std"),
        (("clip={rule='Unclipped', noise_std=0.0}",), "over 0"),
        (("clip={rule='Unclipped', noise_std=1.0, R=1.0}",), "'?R'?"),
        (("optimizer.learning_rate='1 / R'",), "needs a clipping norm R"),
        (("recalibration={methods=['private-temperature'], noise_multiplier=5.0}",), "not private"),
        (("sampling='shuffled'", "algorithm='dp-ftrl'"), "is not correlated"),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_that_would_give_it_an_epsilon_are_refused(
    changes: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ClipwiseError, match=message):
        train(Config.parse(CONFIG, "run.toml", changes), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Federated rounds, and scikit-learn's interface


def test_rounds_of_users_have_no_epsilon_either() -> None:
    model = nn.Linear(30, 30)
    made = plan(sampling=cw.FullBatch(2), steps=1, mechanism=Rounds())
    server = Server(made, model, seed=5)
    opened = server.open([0, 1])
    update = {name: torch.full_like(p, 1e3) for name, p in model.named_parameters()}
    mean = server.close([(user, Reply(update, 1)) for user in opened.selected])
    spread = torch.cat([(t - 1e3).reshape(-1) for t in mean.values()])
    assert float(spread.std()) == pytest.approx(STD / 2, rel=0.1)
    assert server.epsilon(1e-3) == math.inf
    with pytest.raises(InvalidPlan, match="private"):
        replace(made, noise_multiplier=None).calibrate(epsilon=5.0, delta=1e-3)


def test_scikit_learns_interface_refuses_it() -> None:
    sklearn = pytest.importorskip("clipwise.sklearn")
    x, y = records().tensors
    for clip in UNCLIPPED:
        with pytest.raises(ClipwiseError, match="private"):
            sklearn.PrivateClassifier(
                epsilon=3.0, delta=1e-3, clip=clip, steps=6, classes=[0, 1], bounds=(-4.0, 4.0)
            ).fit(x.numpy(), y.numpy())
