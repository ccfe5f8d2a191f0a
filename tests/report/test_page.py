"""The page as text: what stands on it, what is escaped, and what a publishable one must not hold anywhere.

`clipwise report`: folders in, a page out.
"""

from __future__ import annotations

import errno
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import clipwise as cw
from clipwise import report
from clipwise.accounting import Ledger, PrivateCalibration
from clipwise.cli.main import main
from clipwise.errors import DataError
from clipwise.report import Run, WrittenPlan, arms_of, joint_of
from clipwise.report.figures import _correlations
from tests.report.samples import HOSTILE, comparison, judged, ledger, made_run, regression_run

UNCOVERED = "Not covered by epsilon: do not publish"


@pytest.fixture
def folder(compared: Path) -> Path:
    return compared.parent


@pytest.fixture
def page(compared: Path) -> str:
    return compared.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def one_number_of_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of single tests need no choice of bins, which would take most of their time."""
    monkeypatch.setattr("clipwise.report.figures.BIN_CHOICES", (15,))


def embedded(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_everything_is_beside_the_page(folder: Path) -> None:
    beside = ["card.md", "figures", "ledgers", "report.html", "result.json"]
    assert sorted(path.name for path in folder.iterdir()) == beside
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert {"reliability", "confidence", "true-class", "clipping-norm", "training", "privacy"} < names
    for name in names:
        assert (folder / "figures" / f"{name}.svg").read_text().startswith("<svg")
        json.loads((folder / "figures" / f"{name}.json").read_text())


def test_sections_and_headline_numbers(page: str) -> None:
    for text in ("Results on held-out data", "Privacy", "Figures", "How it was made", UNCOVERED):
        assert f"<h2>{text}</h2>" in page
    arms = report.arms_of(comparison(seeds=2))
    for arm in arms:
        assert f"{100 * arm.estimates['ece'].mean:.2f}\u00a0%" in page
    for kind in ("numerically exact", "upper bound", "approximation"):
        assert f">{kind}</span>" in page
    assert "1.563" in page and "This page rests on 5 private runs" in page
    assert "Poisson: each of 60,000 records" in page and "clipwise train config.toml --seed 1" in page


def test_nothing_is_fetched(page: str) -> None:
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert "default-src 'none'" in page
    assert not re.findall(r"@import|url\((?!#)", page)


def test_embedded_data_and_result_file_are_the_same(page: str, folder: Path) -> None:
    data = embedded(page)
    assert data == json.loads((folder / "result.json").read_text())
    first = data["arms"][0]  # type: ignore[index]
    assert first["name"] == "not private" and len(first["runs"]) == 2
    assert "private-training" in data["not_covered_by_epsilon"]["figures"]  # type: ignore[index]


def test_figures_are_drawn_from_the_saved_values(folder: Path) -> None:
    values = json.loads((folder / "figures" / "reliability.json").read_text())
    arm = report.arms_of(comparison(seeds=2))[1]
    assert values["R = 1"]["ece"] == pytest.approx(arm.estimates["ece"].mean)
    assert f"ECE {100 * values['R = 1']['ece']:.1f} %" in (folder / "figures" / "reliability.svg").read_text()


def test_ids_are_given_once(page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_words_of_the_user_are_escaped_everywhere(tmp_path: Path) -> None:
    private = {HOSTILE: 1.0, "layers": {HOSTILE: {"norm_median": 1.0}}}
    runs = [
        made_run(
            f"{HOSTILE} {norm:g}",
            norm,
            warnings=(HOSTILE,),
            config=HOSTILE,
            provenance={
                "command": HOSTILE,
                "model": HOSTILE,
                "data": {"name": HOSTILE, "since_the_start": HOSTILE},
            },
            recalibrated={HOSTILE: judged(0, 1.0)},
            curves=({"step": 1, "test": {"ece": 0.1}, "private": private},),
        )
        for norm in (1.0, 10.0)
    ]
    page = report.write(runs, tmp_path).read_text(encoding="utf-8")
    assert "<script>window" not in page
    assert html.escape(HOSTILE, quote=False).split("$")[0] in page
    assert str(embedded(page)["arms"][0]["name"]).startswith(HOSTILE)  # type: ignore[index]
    assert "<script>" not in (tmp_path / "card.md").read_text(encoding="utf-8")


SECRETS = ("31415926", "fraction_clipped", "987654321", "config.toml", UNCOVERED, "0.27182818")


def secretive(name: str = "R = 1", clip_norm: float | None = 1.0) -> Run:
    private = {"loss": 31415926.0, "fraction_clipped": 0.27182818, "batch_size": 31415926}
    layers = {"hidden": {"fraction_clipped": 0.27182818, "norm_median": 31415926.0}}
    rows = tuple({"step": s, "test": {"accuracy": 0.5}, "private": {**private, "layers": layers}} for s in (1, 2))
    return made_run(name, clip_norm, curves=rows, seed=987_654_321)


@pytest.mark.usefixtures("figures_in_words")
def test_the_full_page_holds_what_is_not_covered(tmp_path: Path) -> None:
    everything = report.write(secretive(), tmp_path).read_text(encoding="utf-8")
    for secret in SECRETS:
        assert secret in everything
    assert "5ec2e7" not in everything, "a digest of the data is on no page"


def test_a_publishable_page_holds_nothing_that_is_not_covered(tmp_path: Path) -> None:
    report.write([secretive(), secretive("R = 10", 10.0)], tmp_path, publishable=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"report.html", "result.json", "card.md", "reliability.svg"}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for secret in (*SECRETS, "5ec2e7"):
            assert secret not in text, f"{path.name} tells {secret}"
    assert "1.563" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("figures_in_words")
def test_a_publishable_page_leaves_nothing_of_an_earlier_one_beside_it(tmp_path: Path) -> None:
    report.write([secretive(), secretive("R = 10", 10.0)], tmp_path)
    (tmp_path / "figures" / "mine.svg").write_text("the user's")
    assert (tmp_path / "figures" / "private-training.json").exists()
    report.write(secretive(), tmp_path, publishable=True)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or not any(secret in path.read_text(encoding="utf-8") for secret in SECRETS), path.name
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "mine.svg" in names and not names & {"private-training.svg", "clipping-norm.json"}


def test_a_publishable_page_does_not_go_into_a_runs_folder(tmp_path: Path) -> None:
    secretive().save(tmp_path)
    with pytest.raises(DataError, match="is a run's folder"):
        report.write(secretive(), tmp_path, publishable=True)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("figures_in_words")
def test_that_there_was_a_seed_is_told_to_readers_of_a_publication(tmp_path: Path) -> None:
    page = report.write(secretive(), tmp_path, publishable=True).read_text(encoding="utf-8")
    for text in (page, (tmp_path / "card.md").read_text(encoding="utf-8")):
        assert "Trained with a fixed seed" in text and "987654321" not in text
    assert "fixed seed" not in report.card(replace(made_run(), seed=None))


@pytest.mark.usefixtures("figures_in_words")
def test_a_publishable_page_has_no_run_without_privacy(tmp_path: Path) -> None:
    page = report.write([made_run(), made_run("open", None)], tmp_path, publishable=True).read_text(encoding="utf-8")
    assert "Left out because no epsilon holds for it: <strong>open</strong>" in page
    assert [arm["name"] for arm in embedded(page)["arms"]] == ["R = 1"]  # type: ignore[union-attr, index]
    with pytest.raises(DataError, match="none of these runs is private"):
        report.write(made_run(clip_norm=None), tmp_path, publishable=True)


def test_the_card_is_short_and_tells_nothing_private() -> None:
    card = report.card(secretive())
    assert len(card.splitlines()) < 60
    for secret in SECRETS:
        assert secret not in card
    for text in ("1.563", "numerically exact", "approximation", "| ECE |", "Abadi, R = 1", "Poisson", "held-out"):
        assert text in card
    for asked in (
        *("Protected unit", "Neighbouring data", "Setting", "Mechanism", "Released", "Accounting", "Tuning", "Model"),
        *("All that touched the data", "Not covered", "Tools", "Trust", "Small groups", "Verification"),
    ):
        assert f"- **{asked}:** " in card
    assert "Not private" in report.card(made_run(clip_norm=None))
    assert "**Unknown.**" in report.card(Run.judged("theirs", made_run().test))


def test_a_card_counts_steps_and_says_what_interrupted_ones_are() -> None:
    steps = [
        replace(event, steps=count, reason=reason)
        for event in ledger().events
        for count, reason in ((960, "training"), (198, "interrupted"), (2_042, "training"))
    ]
    card = report.card(made_run(ledger=Ledger([*steps, PrivateCalibration(20.0)])))
    assert "the ledger has 3,002 steps for training; 198 steps interrupted; 1 release for calibration." in card
    assert "Interrupted steps were begun before a stop or a crash" in card
    assert "Interrupted steps" not in report.card(made_run())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("new", "; its first weights were drawn at random."),
        (None, "; where its first weights come from is not known here, and what they were trained on is not covered."),
        ({"continues": "the run a"}, "; it continues the run a, whose releases are on its ledger and in its epsilon."),
        (
            {"from": "b", "tensors": "all"},
            "; its first weights are those of b (all), which this epsilon does not cover",
        ),
    ],
)
def test_a_card_says_where_the_first_weights_come_from(found: object, said: str) -> None:
    run = made_run()
    card = report.card(replace(run, provenance={**run.provenance, "first_weights": found}))
    (line,) = (line for line in card.splitlines() if line.startswith("- **Model:**"))
    assert said in line


def test_runs_that_may_hold_each_other_cost_at_most_their_sum() -> None:
    first = made_run(seed=0)
    assert first.ledger is not None
    both = [first, made_run("R = 10", seed=1)]
    found = joint_of(both)
    assert found is not None and found.guarantee is not None and found.guarantee.kind == "numerically exact"
    held = Ledger([*(event.changed(reason="earlier run") for event in first.ledger.events), *ledger().events])
    found = joint_of([first, replace(both[1], ledger=held)])
    assert found is not None and found.guarantee is not None and found.guarantee.kind == "upper bound"


@pytest.mark.usefixtures("figures_in_words")
@pytest.mark.parametrize("order", [("with", "without"), ("without", "with")])
def test_runs_with_different_metrics_are_compared_in_any_order(
    order: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regression_run("with").save(tmp_path / "with")
    known = regression_run("without")
    replace(known, test=replace(known.test, nll=None, coverage={})).save(tmp_path / "without")
    assert main(["report", *(str(tmp_path / name) for name in order), "--output", str(tmp_path / "page")]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "–" in rows["without"] and "–" not in rows["with"] and "NLL" in rows["model"]


def test_a_card_names_the_steps_of_an_earlier_run() -> None:
    (event,) = ledger().events
    card = report.card(made_run(ledger=Ledger([event, replace(event, steps=640, reason="earlier run")])))
    assert "; 640 steps of an earlier run. Warnings" in card


def test_the_card_of_predictions_that_were_only_judged_says_nothing_of_training() -> None:
    card = report.card(Run.judged("theirs", judged(0, 1.0)))
    assert "## Training" not in card and "trained on, not the" not in card and "exact numbers of these records" in card


@pytest.mark.usefixtures("figures_in_words")
def test_captions_speak_of_seeds_where_there_are_several(tmp_path: Path) -> None:
    one = report.write(made_run(), tmp_path / "one").read_text(encoding="utf-8")
    three = report.write([made_run(seed=seed) for seed in range(3)], tmp_path / "three").read_text(encoding="utf-8")
    assert "over the seeds, with one standard deviation" in three and "standard deviation" not in one
    assert "No sample was left out." in one and "relation zero" not in one and "with one record blanked" in one


def test_a_card_of_several_seeds_says_so() -> None:
    card = report.card([made_run(seed=seed) for seed in range(3)])
    assert "each of 3 runs alone" in card and "| metric | mean |" in card
    with pytest.raises(ValueError):
        report.card(comparison(seeds=1))


@pytest.mark.usefixtures("figures_in_words")
def test_a_runs_own_result_is_never_replaced(tmp_path: Path) -> None:
    run = made_run()
    run.save(tmp_path)
    report.write(run, tmp_path)
    again = Run.load(tmp_path)
    assert again.test == run.test and again.name == run.name


@pytest.mark.usefixtures("figures_in_words")
def test_a_full_disk_is_told_and_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"report.html cannot be written: .*No space left"):
        report.write(made_run(curves=()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_run_with_little_in_it_still_makes_a_page(tmp_path: Path) -> None:
    bare = Run(name="bare", test=judged(0, 1.0), plan=WrittenPlan({}))
    page = report.write(bare, tmp_path).read_text(encoding="utf-8")
    assert "is not known here: nothing is said about privacy." in page and "bare: accuracy and calibration" in page


@pytest.mark.usefixtures("figures_in_words")
def test_other_numbers_of_bins_are_drawn_as_they_are(tmp_path: Path) -> None:
    from clipwise.calibration import evaluate
    from tests.report.samples import scores

    logits, labels = scores(0, 1.2)
    seven = made_run("seven", test=evaluate(logits=logits, labels=labels, bins=7))
    page = report.write([seven, made_run()], tmp_path).read_text(encoding="utf-8")
    assert set(re.findall(r'data-bins="(\d+)"', page)) == {"7"}, "as they are, without a choice"
    assert f"ECE {100 * seven.test.ece:.1f} %" in page


@pytest.mark.usefixtures("figures_in_words")
def test_recalibration_is_shown_beside_the_model_as_trained(tmp_path: Path) -> None:
    after = judged(0, 1.0, resamples=100)
    page = report.write(made_run(recalibrated={"temperature": after}), tmp_path).read_text(encoding="utf-8")
    assert "After recalibration" in page and ">as trained<" in page and ">temperature<" in page
    assert after.intervals is not None
    assert " – ".join(f"{100 * end:.2f}" for end in after.intervals["ece"]) in page


@pytest.mark.usefixtures("figures_in_words")
def test_a_grid_has_a_heat_map(tmp_path: Path) -> None:
    grid = [made_run(f"{r:g} {lr:g}", r, 1.2, learning_rate=lr, curves=()) for r in (1.0, 10.0) for lr in (0.1, 1.0)]
    report.write(grid, tmp_path)
    assert len(json.loads((tmp_path / "figures" / "heat-map.json").read_text())) == 4


@pytest.mark.usefixtures("figures_in_words")
def test_regression_has_its_own_page(tmp_path: Path) -> None:
    page = report.write([regression_run(), regression_run("R = 10", 0.95)], tmp_path).read_text(encoding="utf-8")
    assert "Do the intervals hold the truth?" in page and "Coverage of 90 %" in page and "RMSE" in page


@pytest.mark.slow
def test_infinite_numbers_are_strict_json(tmp_path: Path) -> None:
    run = made_run()
    report.write(replace(run, test=replace(run.test, nll=float("inf"))), tmp_path)
    json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert "infinite" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for run in comparison(seeds=2):
        run.save(tmp_path / "runs" / f"{run.name} {run.seed}")
    return tmp_path / "runs"


@pytest.mark.usefixtures("figures_in_words")
def test_one_run_gets_its_page_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run("mine").save(tmp_path / "mine")
    assert main(["report", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "mine" / "report.html").is_file() and (tmp_path / "mine" / "card.md").is_file()
    assert "1.563" in out and out.endswith("report.html\n")


@pytest.mark.usefixtures("figures_in_words")
def test_a_folder_of_runs_is_compared_also_a_second_time(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["report", str(runs)]) == 0
        out = capsys.readouterr().out
        assert "ECE" in out and str(runs / "report.html") in out
        assert [line.split("  ")[1] for line in out.splitlines()[2:5]] == ["not private", "R = 1", "R = 10"]
    assert json.loads((runs / "result.json").read_text())["format"] == "clipwise comparison"


@pytest.mark.usefixtures("figures_in_words")
def test_publishable_goes_to_a_folder_of_its_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--publishable", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(runs / "publishable" / "report.html")
    assert set(printed["estimates"]) == {"R = 1", "R = 10"}
    assert printed["epsilon"]["R = 1"] == pytest.approx(1.563, abs=1e-3)
    assert not (runs / "report.html").exists()


@pytest.mark.usefixtures("figures_in_words")
def test_a_page_on_named_runs_does_not_spread_over_the_folder_of_all_runs(runs: Path) -> None:
    before = {path.name for path in runs.iterdir()}
    assert main(["report", str(runs / "R = 1 0"), str(runs / "R = 10 0")]) == 0
    assert {path.name for path in runs.iterdir()} - before == {"report"}
    assert (runs / "report" / "report.html").is_file()
    assert main(["report", str(runs / "R = 1 0"), str(runs / "R = 1 0")]) == 0, "one run, twice"
    assert not (runs / "R = 1 0" / "report").exists()


@pytest.mark.usefixtures("figures_in_words")
@pytest.mark.parametrize("publishable", [False, True])
def test_every_card_names_a_ledger_that_is_beside_it_and_has_its_epsilon(
    runs: Path, tmp_path: Path, publishable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*(["--publishable"] if publishable else []), "--output", str(tmp_path / "page")]
    assert main(["report", str(runs), *both]) == 0
    card = (tmp_path / "page" / "card.md").read_text()
    commands = re.findall(r"`clipwise (epsilon --ledger (\S+) --delta \S+)`", card)
    stated = re.findall(r"^\| exact \| (\S+) \|", card, re.MULTILINE)
    assert len(commands) == len(stated) == 2
    for (command, named), epsilon in zip(commands, stated, strict=True):
        _, _, _, *delta = command.split()
        path = tmp_path / "page" / named
        assert set(json.loads(path.read_text())) == {"format", "version", "run", "relation", "events", "checksum"}
        capsys.readouterr()
        assert main(["epsilon", "--ledger", str(path), *delta]) == 0 and epsilon in capsys.readouterr().out
    one = runs / "R = 1 0"
    assert main(["report", str(one)]) == 0 and not (one / "ledgers").exists(), "it has its own"
    assert "--ledger ledger.json" in (one / "card.md").read_text()


@pytest.mark.usefixtures("figures_in_words")
def test_output_names_the_page_or_its_folder(runs: Path, tmp_path: Path) -> None:
    one = str(runs / "R = 1 0")
    assert main(["report", one, "--output", str(tmp_path / "a" / "page.html")]) == 0
    assert main(["report", one, one, "--output", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "page.html").is_file() and (tmp_path / "b" / "report.html").is_file()


@pytest.mark.usefixtures("figures_in_words")
def test_runs_without_a_common_folder_need_an_output(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.path.commonpath", lambda paths: Path(runs.anchor))
    assert main(["report", str(runs / "R = 1 0"), str(runs / "R = 10 0")]) == 2
    assert "say with --output" in capsys.readouterr().err


@pytest.mark.usefixtures("figures_in_words")
def test_what_is_no_run_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither a finished run" in capsys.readouterr().err
    (tmp_path / "result.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "not JSON as clipwise writes it" in capsys.readouterr().err
    assert main(["report"]) == 2


def correlated(plan: cw.Plan) -> list[str]:
    """The names of the figures that show its noise."""
    return [drawn.name for drawn in _correlations(arms_of([made_run(plan=plan)]))]


@pytest.mark.usefixtures("figures_in_words")
def test_noise_that_is_correlated_is_drawn_and_a_plan_that_would_take_hours_is_not() -> None:
    wide = cw.Plan(cw.CyclicPoisson(60_000, 256, 8), 300, cw.Abadi(1.0), 1.0, correlation=cw.Banded(8))
    trees = cw.Plan(cw.Shuffled(60_000, 256), 300, cw.Abadi(1.0), 1.0, correlation=cw.Tree())
    assert correlated(wide) == correlated(trees) == ["correlation"]
    assert correlated(replace(wide, correlation=cw.Independent())) == []
    long = replace(trees, steps=10**12)
    many = cw.Plan(cw.CyclicPoisson(60_000, 2, 1_024), 90_000, cw.Abadi(1.0), 1.0, correlation=cw.Banded(1_024))
    ending = replace(wide, correlation=cw.Banded(8, 0.0, (1.0, 0.5)))  # of a file: rates for two steps only
    assert correlated(long) == correlated(many) == correlated(ending) == []


@pytest.mark.usefixtures("figures_in_words")
def test_the_command_prints_what_its_runs_cost_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k, name in enumerate(("small", "large")):
        made_run(name, 1.0 + k, seed=k, curves=()).save(tmp_path / name)
    assert main(["report", str(tmp_path / "small")]) == 0
    assert "costs epsilon" not in capsys.readouterr().out
    assert main(["report", str(tmp_path / "small"), str(tmp_path / "large"), "--output", str(tmp_path / "both")]) == 0
    said = capsys.readouterr().out
    joint = joint_of(Run.load(tmp_path / name) for name in ("small", "large"))
    assert joint is not None and joint.guarantee is not None
    assert f"publishing something of all of them costs epsilon = {joint.guarantee.printed}" in said
