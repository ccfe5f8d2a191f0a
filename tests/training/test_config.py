"""Configurations are read strictly: every mistake is an error that names its place and the way out."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise as cw
from clipwise.accounting import default_delta
from clipwise.clipping import Flat, Groupwise, Layerwise, MixUp
from clipwise.data import Schema, from_file
from clipwise.errors import InvalidConfig
from clipwise.training import Config
from clipwise.training.algorithms import PrivateSGD
from clipwise.training.config import OptimizerChoice
from clipwise.training.config.steps import RULES, read_clip
from clipwise.training.config.toml import TomlText, nearest, write

from .common import TINY, config

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), flags=re.DOTALL
)


def clip(text: str) -> Any:
    return read_clip(TomlText.parse(text).root())


def optimizer(override: str) -> OptimizerChoice:
    algorithm = config(override).algorithm
    assert isinstance(algorithm, PrivateSGD)
    return algorithm.optimizer


def test_a_whole_configuration() -> None:
    made = config()
    assert (made.name, made.seed, made.algorithm.name, made.output) == ("tiny", 3, "dp-sgd", Path("runs/tiny"))
    assert made.clip == Flat(cw.Abadi(1.0))
    assert made.batches.scheme(1_297) == cw.Poisson(1_297, 64)
    assert isinstance(made.algorithm, PrivateSGD)
    assert made.algorithm.optimizer.name == "SGD" and str(made.algorithm.optimizer.learning_rate) == "0.5"
    assert made.text == TINY


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[0]", "expected two numbers, [low, high], got 1"),
        ("[0, 1, 2]", "got 3"),
        ("[1, 1]", "finite numbers low < high"),
        ("[2, 1]", "finite numbers low < high"),
        ("['a', 'b']", "expected a number"),
        ("[0, 1e39]", "numbers of float32"),
        ("[1, 1.00000000000000000001]", "low < high"),
        ("5", "got 1"),
    ],
)
def test_bounds_of_a_target_are_two_numbers(given: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(said)) as refused:
        config(f"data.target_bounds={given}")
    assert "data.target_bounds:" in str(refused.value)
    assert config("data.target_bounds=[-1, 2.5]").data.target_bounds == cw.data.TargetBounds(-1.0, 2.5)


def test_a_norm_beside_a_schedule_is_answered_with_what_works() -> None:
    mixed = "clip={schedule='MixUp', switch_at=0.5, small={rule='Abadi', R=1}, large={rule='Abadi', R=10}}"
    with pytest.raises(InvalidConfig, match=r"clip\.R: a schedule has its norms in small and large") as refused:
        config(mixed, "clip.R=5")
    advised = re.search("--set '(clip=.*)'", str(refused.value))
    assert advised is not None and config(mixed, advised[1]).clip == Flat(cw.Abadi(1.0))
    assert config(mixed, "clip.small.R=5").clip == MixUp(cw.Abadi(5.0), cw.Abadi(10.0), 0.5)


@pytest.mark.parametrize("overrides", [(), ("steps=9",)])
def test_what_a_folder_keeps_has_the_name_of_the_run(overrides: tuple[str, ...]) -> None:
    """The stored file is called config.toml, whatever the run is called."""
    made = config(*overrides, text=TINY.replace('name = "tiny"\n', ""))
    again = Config.parse(made.text, "config.toml")
    assert again.name == made.name == "tiny" and again.text == made.text and again.batches == made.batches


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=5", r"--set stepz=5: stepz: the configuration has no such key; did you mean 'steps'\?"),
        ("clip.RR=5", r"clip.RR: \[clip\] has no such key; did you mean 'R'\?"),
        ("clip.rule=Abbadi", "clip.rule: 'Abbadi' is not known; did you mean 'Abadi'"),
        ("clip.R='1'", r"clip.R: expected a number, got a string \('1'\)"),
        ("clip.R=-1", "clip.R: must be a finite number over 0, got -1"),
        ("clip.R=nan", "clip.R: must be a finite number over 0, got nan"),
        ("clip.R=true", "clip.R: expected a number, got true or false"),
        ("clip.gamma=0.1", "has no such key"),
        ("clip=5", "clip: expected a table, got an integer"),
        ("steps=0", "steps: must be at least 1, got 0"),
        ("steps=2.5", "steps: expected an integer, got a number"),
        ("batch_size=0", "batch_size: must be a finite number over 0"),
        ("batch_size=nan", "batch_size: must be a finite number over 0"),
        ("batch_size=true", "batch_size: expected a number"),
        ("sampling=full-batch", "batch_size is required, except with sampling = 'full-batch'"),
        ("sampling=poison", "'poison' is not known; did you mean 'poisson'"),
        ("seed=-1", "seed: must be at least 0"),
        ("name=''", "name: is an empty string"),
        ("device=abacus", "device: 'abacus' cannot be used"),
        ("algorithm=dp-sdg", "did you mean 'dp-sgd'"),
        ("data.source=mnits", "data.source: is neither a file .* Did you mean 'mnist'"),
        ("data.pol=2", "data.pol: .*did you mean 'pool'"),
        ("data.std=0", "data.std: must be over 0"),
        (
            "data={source='a.csv', test='half'}",
            "data.test: expected a share below 1, or a number of records, got 'half'",
        ),
        ("data={source='a.csv', test=1.5}", "data.test: expected a share below 1"),
        ("data={source='a.csv', features='age'}", "data.features: expected an array, got a string"),
        ("data={source='a.csv', classes=[0.5]}", "data.classes: expected an array of strings or integers"),
        ("data={source='a.csv', delimiter='::'}", "data.delimiter: expected a single character"),
        ("data={source='a.csv', target=3}", "data.target: expected a string, got an integer"),
        ("data={source='a.csv', seed='x'}", "data.seed: expected an integer"),
        ("seed=99999999999999999999", "seed: an integer of 67 bits; there are 64 at most"),
        ("data.mean=[]", "data.mean: is an empty array"),
        ("data.mean=['a']", "data.mean: expected a number or an array of them"),
        ("model.source=mlpp", "is neither a built-in network.*did you mean 'mlp'"),
        (f"model.source={'a' * 5000}", "is neither a built-in network"),
        ("model.hiden=[8]", "did you mean 'hidden'"),
        ("model.hidden=[0]", "integers must be at least 1"),
        ("model.hidden=8", "expected an array, got an integer"),
        ("model.activation=rellu", "did you mean 'relu'"),
        ("optimizer.name=SDG", "did you mean 'SGD'"),
        ("optimizer.lr=0.1", "is called learning_rate here"),
        ("correlation.kind=bands", "correlation.kind: .*banded"),
        ("correlation={kind='banded'}", "correlation: 'bands' is missing"),
        ("correlation={kind='banded', bands=4, momentum=1.0}", "correlation: momentum must be a number from 0 to 1"),
        ("correlation={kind='tree', bands=4}", "correlation.bands"),
        ("bands=4", "is the number of groups of sampling = 'cyclic-poisson'"),
        ("sampling=cyclic-poisson", "is the number of groups of sampling = 'cyclic-poisson'"),
        ("reshuffle=false", "is for sampling = 'shuffled' only"),
        ("optimizer.momentun=0.9", "torch.optim.SGD has no such option; did you mean 'momentum'"),
        ("optimizer.learning_rate=fast", "a string such as '1.5 / R', got 'fast'"),
        ("optimizer.learning_rate=-1/R", "a string such as '1.5 / R'"),
        ("optimizer.learning_rate=[1]", "expected a number, got an array"),
        ("privacy.epsilon=2", "exactly one of epsilon, noise_multiplier"),
        ("privacy.private=false", "goes with nothing else"),
        ("privacy.noise_multiplier={}", "begins with step 0"),
        ("privacy.noise_multiplier={5=1.0}", "begins with step 0"),
        ("privacy.noise_multiplier={0=2.0, late=1.0}", "privacy.noise_multiplier.late: .* step numbers"),
        ("privacy.noise_multiplier={0=2.0, -5=1.0}", "privacy.noise_multiplier.-5: .* step numbers"),
        ("privacy.noise_multiplier={0=2.0, 05=1.0}", "privacy.noise_multiplier.05: .* step numbers"),
        ("privacy.noise_multiplier={0=2.0, 5=0}", "privacy.noise_multiplier.5: must be a finite number over 0"),
        ("privacy.noise_multiplier=[2.0, 1.0]", "privacy.noise_multiplier: expected a number, got an array"),
        ("privacy.delta=1.5", "privacy.delta: must be a finite number over 0 and under 1"),
        ("evaluation.evry=4", "did you mean 'every'"),
        ("evaluation.resamples=50", r"evaluation: resamples must be 0 \(no intervals\) or at least 100"),
        ("evaluation.bins=20000", "evaluation: bins must be an integer from 1 to 10,000"),
        ("recalibration.share=0.5", "'methods' is missing"),
        ("recalibration.methods=['temprature']", "did you mean 'temperature'"),
        ("recalibration.methods=['temperature', 'temperature']", "names a method twice"),
        ("recalibration={methods=['private-temperature']}", "needs a noise_multiplier"),
        ("recalibration={methods=['vector'], noise_multiplier=1}", "for private-temperature only"),
        ("steps", "--set needs KEY=VALUE"),
        (f"steps={'9' * 5_000}", "--set steps=999.* Exceeds the limit"),
        (f"steps=0x{'f' * 5_000}", "--set steps=0xfff.*steps: an integer of 20000 bits"),
        (f"steps={'[' * 50_000}", "--set steps=.*recursion"),
        (f"steps={'[' * 20}{']' * 20}", "more than 12 deep"),
        ("steps=5\nseed=4", "has a control character"),
        ('name="\\u001b[31m"', "name: has a control character"),
        ("steps.x=1", "'steps' is not a table"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        config(override)


@pytest.mark.parametrize(
    ("wrong", "line", "message"),
    [
        ("R = 1.0", 16, "clip.RR"),
        ("hidden = [8]", 12, "model.hiddenn"),
        ("seed = 3", 3, "seeed"),
    ],
)
def test_the_line_is_named(wrong: str, line: int, message: str) -> None:
    key = message.rpartition(".")[2]
    text = TINY.replace(wrong, wrong.replace(wrong.split()[0], key, 1))
    with pytest.raises(InvalidConfig, match=rf"tiny.toml, line {line}: {message}: "):
        config(text=text)


def test_keys_of_inline_tables_are_on_the_line_of_the_table() -> None:
    text = TINY.replace('[clip]\nrule = "Abadi"\nR = 1.0\n', "").replace(
        "steps", 'clip = {rule = "Abadi", R = "x"}\nsteps'
    )
    with pytest.raises(InvalidConfig, match=r"line 4: clip\.R: expected a number"):
        config(text=text)


@pytest.mark.parametrize("missing", ["data", "model", "optimizer", "privacy", "clip"])
def test_missing_tables_are_named(missing: str) -> None:
    parts = TINY.split("\n[")
    text = "\n[".join(part for part in parts if not part.startswith(f"{missing}]"))
    with pytest.raises(InvalidConfig, match=missing):
        config(text=text)


def test_not_toml_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"tiny.toml is not TOML: .*line 2"):
        config(text="steps = 5\nsteps == 6")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Config.load(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Config.load(binary)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_can_be_named(name: str) -> None:
    numbers = {"R": 2.0, "Z": 3.0, "noise_std": 4.0}
    needed = {
        "GlobalScaled": ("R", "Z"),
        "Unclipped": ("noise_std",),
        **dict.fromkeys(("Abadi", "BatchClip", "Global"), ("R",)),
    }.get(name, ())
    text = f'rule = "{name}"\n' + "".join(f"{key} = {numbers[key]}\n" for key in needed)
    assert clip(text) == Flat(RULES[name](**{key: numbers[key] for key in needed}))


def test_every_rule_of_the_package_is_known() -> None:
    rules = {
        name for name in cw.__all__ if isinstance(getattr(cw, name), type) and hasattr(getattr(cw, name), "sensitivity")
    }
    assert rules - {"Flat", "Layerwise", "Groupwise"} == set(RULES)


def test_styles_and_schedules() -> None:
    assert clip('style = "Layerwise"\nrule = "Abadi"\nR = 1\nnoise = "per_layer"') == Layerwise(
        cw.Abadi(1.0), "per_layer"
    )
    layers = clip('style = "Layerwise"\n[layers]\na = {rule = "Abadi", R = 1.0}\nb = {rule = "Normalize"}')
    assert layers == Layerwise({"a": cw.Abadi(1.0), "b": cw.Normalize()})
    groups = clip('style = "Groupwise"\n[groups]\n"a.*" = {rule = "Abadi", R = 1.0}\n"*" = {rule = "Automatic"}')
    assert groups == Groupwise({"a.*": cw.Abadi(1.0), "*": cw.Automatic()}) and list(groups.rules) == ["a.*", "*"]
    mixed = clip(
        'schedule = "MixUp"\nswitch_at = 0.9\nsmall = {rule = "Abadi", R = 0.1}\n'
        'large = {style = "Layerwise", rule = "Abadi", R = 5}'
    )
    assert mixed == MixUp(cw.Abadi(0.1), Layerwise(cw.Abadi(5.0)), 0.9)


def test_a_norm_that_adapts() -> None:
    assert clip('rule = "AdaptiveClip"\nR = 2') == cw.AdaptiveClip(2.0) == cw.AdaptiveClip(2.0, 0.5, 0.02)
    whole = 'rule = "AdaptiveClip"\nR = 2.0\nquantile = 0.7\nfloor = 0.5\nlearning_rate = 0.3\nshare = 0.02'
    assert clip(whole) == cw.AdaptiveClip(2.0, 0.7, 0.5, 0.3, 0.02)
    assert config("clip.rule=AdaptiveClip").clip == cw.AdaptiveClip(1.0)  # the R of a rule is where it starts


def test_a_file_takes_every_option_of_from_file() -> None:
    options = {"target": "a", "task": "regression", "features": ["b"], "classes": ["c"], "test": 0.5, "seed": 1}
    table = {"source": "a.csv", **options, "test_file": "b.csv", "delimiter": "\t"}
    read = config(text=write({**TomlText.parse(TINY).values, "data": table})).data.options
    columns = {"columns": {"b": {"kind": "number", "low": 0, "high": 1}}}
    described = config(text=write({**TomlText.parse(TINY).values, "data": {"source": "a.csv", **columns}})).data.options
    assert {*read, *described} == set(inspect.signature(from_file).parameters) - {"path"}
    assert read["features"] == ("b",) and read["delimiter"] == "\t" and described["schema"].features == ("b",)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            'columns.b = {kind = "number", low = 1, high = 1}',
            "data.columns: column 'b' needs finite numbers low < high",
        ),
        ('columns.b = {kind = "numbr"}', "kind should be one of number, category, got 'numbr'"),
        ('columns.b = {kind = "category", categories = ["x"], low = 3}', "missing or unknown is low"),
        ('features = ["b"]\ncolumns.b = {kind = "number", low = 0, high = 1}', "goes with no"),
        ('standardise = true\ncolumns.b = {kind = "number", low = 0, high = 1}', "scales the inputs itself"),
        ("columns = {}", "a schema needs one column"),
    ],
)
def test_columns_are_read_strictly(lines: str, message: str) -> None:
    start = write({k: v for k, v in TomlText.parse(TINY).values.items() if k != "data"})
    with pytest.raises(InvalidConfig, match=message):
        config(text=f'{start}\n[data]\nsource = "a.csv"\n{lines}\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schedule = "MixUp"\nsmall = {rule = "Normalize"}', "'switch_at' is missing"),
        ('schedule = "MixUp"\nswitch_at = 0.5\nsmall = {rule = "Normalize"}', "'large' is missing"),
        ('schedule = "MixUp"\nswitch_at = 1.5\nsmall = {rule = "Normalize"}\nlarge = {rule = "Normalize"}', "fraction"),
        ('schedule = "MixUp"\nR = 1\nswitch_at = 0.5\nsmall = {rule = "Normalize"}\nlarge = {rule = "Normalize"}', "R"),
        ('style = "Groupwise"', "'groups' is missing"),
        ('style = "Layerwise"\nrule = "Abadi"\nR = 1\nlayers = {a = {rule = "Normalize"}}', "has no such key"),
        ('style = "Flat"\nrule = "Normalize"\nnoise = "joint"', "has no such key"),
        ('rule = "Abadi"', "'R' is missing; it is a number"),
        ("R = 1.0", "'rule' is missing; it is a string"),
        ('rule = "AdaptiveClip"', "'R' is missing; it is a number"),
        ('rule = "AdaptiveClip"\nR = 1\nfloor = 2', "floor"),
        ('rule = "AdaptiveClip"\nR = 1\nquantile = 1.0', "quantile"),
        ('rule = "AdaptiveClip"\nR = 1\nfloors = 2', "did you mean 'floor'"),
        ('rule = "AdaptiveClp"\nR = 1', "did you mean 'AdaptiveClip'"),
        ('style = "Layerwise"\nrule = "AdaptiveClip"\nR = 1', "stands in .clip. alone"),
        ('style = "Groupwise"\ngroups = {"*" = {rule = "AdaptiveClip", R = 1}}', "stands in .clip. alone"),
        (
            'schedule = "MixUp"\nswitch_at = 1\nsmall = {rule = "AdaptiveClip", R = 1}\nlarge = {rule = "Normalize"}',
            "stands in .clip. alone",
        ),
    ],
)
def test_clips_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        clip(text)


def test_the_learning_rate_follows_the_joint_sensitivity() -> None:
    names = ["a.weight", "a.bias", "b.weight"]
    rule = optimizer("optimizer.learning_rate=1.5 / R").learning_rate
    assert rule.at(Flat(cw.Abadi(0.1)), names) == pytest.approx(15.0)
    assert rule.at(Layerwise(cw.Abadi(0.1)), names) == pytest.approx(15.0 / math.sqrt(2))
    with pytest.raises(InvalidConfig, match="needs a clipping norm R"):
        rule.at(Flat(cw.NoClip()), names)


def test_optimizers_take_their_own_options() -> None:
    chosen = optimizer("optimizer={name='Adam', learning_rate=0.01, betas=[0.8, 0.9]}")
    built = chosen.build([torch.nn.Parameter(torch.zeros(1))])
    assert type(built) is torch.optim.Adam and built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 0.01
    with pytest.raises(InvalidConfig, match=r"torch\.optim\.SGD refuses its options"):
        optimizer("optimizer.momentum=-1").build([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("epochs", "size", "batch", "expected"),
    [(1.0, 100, 10, 10), (0.1, 100, 1, 10), (1.0, 101, 10, 11), (2.5, 8, 4, 5), (1.0, 3, 0.3, 10)],
)
def test_epochs_become_whole_steps(epochs: float, size: int, batch: float, expected: int) -> None:
    batches = config(text=TINY.replace("steps = 12", f"epochs = {epochs}").replace("64", str(batch), 1)).batches
    assert batches.count(batches.scheme(size)) == expected


@pytest.mark.parametrize("sampling", ["shuffled", "fixed-size"])
def test_batches_of_a_known_size_have_no_fractions(sampling: str) -> None:
    with pytest.raises(InvalidConfig, match=f"batch_size: must be an integer with sampling = '{sampling}', whose"):
        config(f"sampling={sampling}", "batch_size=12.5")


def test_samplings() -> None:
    assert config("max_batch_size=80").batches.scheme(500) == cw.Poisson(500, 64, 80)
    assert config("batch_size=12.5").batches.scheme(500) == cw.Poisson(500, 12.5)
    assert repr(config("batch_size=64.0").batches.scheme(500)) == repr(cw.Poisson(500, 64))
    by_rate = config("batch_size=12.5", "rate=0.01", "privacy.delta=1e-5", "data.source=mnist")
    assert by_rate.batches.scheme(0) == cw.Poisson(rate=0.01, batch_size=12.5)
    assert config("sampling=shuffled").batches.scheme(500) == cw.Shuffled(500, 64)
    assert config("sampling=shuffled", "reshuffle=false").batches.scheme(500) == cw.Shuffled(500, 64, reshuffle=False)
    assert config("sampling=cyclic-poisson", "bands=4").batches.scheme(500) == cw.CyclicPoisson(500, 64, 4)
    assert config("sampling=fixed-size").batches.scheme(500) == cw.FixedSize(500, 64)
    bins = config("sampling=balls-in-bins", "batch_size=12.5").batches
    assert bins.scheme(500) == cw.BallsInBins(500, 12.5)
    epochs = config("sampling=balls-in-bins", text=TINY.replace("steps = 12", "epochs = 2.5")).batches
    assert epochs.count(epochs.scheme(500)) == 20  # of eight batches each
    full = TINY.replace("batch_size = 64", 'sampling = "full-batch"', 1)
    assert config(text=full).batches.scheme(500) == cw.FullBatch(500)


@pytest.mark.parametrize("size", [1, 9, 10, 11, 999, 1_000, 1_297, 60_000, 10**9])
def test_the_default_delta_is_the_largest_power_of_ten_below_one_over_n(size: int) -> None:
    delta = default_delta(size)
    assert delta < 1 / size <= 10 * delta and math.log10(delta) == pytest.approx(round(math.log10(delta)))


def test_a_run_that_is_not_private_needs_no_clipping() -> None:
    made = config(
        text=TINY.replace('[clip]\nrule = "Abadi"\nR = 1.0\n', "").replace("noise_multiplier = 1.0", "private = false")
    )
    assert made.clip == Flat(cw.NoClip()) and not made.privacy.is_private


def test_steps_on_the_command_line_displace_epochs_of_the_file_and_the_other_way_round() -> None:
    longer = config("epochs=2")
    assert (longer.batches.steps, longer.batches.epochs) == (None, 2.0)
    shorter = Config.parse(longer.text, overrides=["steps=7"])
    assert (shorter.batches.steps, shorter.batches.epochs) == (7, None) and "epochs" not in shorter.text
    for text, overrides in ((f"epochs = 2\n{TINY}", ()), (TINY, ("steps=7", "epochs=2"))):
        with pytest.raises(InvalidConfig, match="exactly one of steps"):
            config(*overrides, text=text)


def test_overrides_are_toml_or_bare_words_and_are_kept() -> None:
    made = config("clip.R=2", "model.activation=relu", "data.mean=[0.5]", "seed=9")
    assert (made.clip, made.seed) == (Flat(cw.Abadi(2.0)), 9)
    again = TomlText.parse(made.text)
    assert again.values["clip"]["R"] == 2 and again.values["data"]["mean"] == [0.5]


@pytest.mark.parametrize(
    "values",
    [
        {"a": 1, "b": -0.5, "c": True, "d": 'q"u\\o\n\té', "e": [1, 2], "f": []},
        {"t": {"u": {"v": 1e-30}, "w": {}}, "odd key.*": {"x": 1}},
        {"a": {"b": 1}, "list": [{"x": 1, "y": "z"}]},
        {"inf": math.inf, "small": 1e22},
    ],
)
def test_what_is_written_reads_back(values: dict[str, Any]) -> None:
    assert TomlText.parse(write(values)).values == values


def test_nearest_does_not_mind_case() -> None:
    assert nearest("abadi", RULES) == "did you mean 'Abadi'?"


def test_documented_columns() -> None:
    (block,) = [block for block in BLOCKS if block.startswith("[data.columns]")]
    columns = Schema.of(TomlText.parse(block).values["data"]["columns"]).columns
    assert [column.name for column in columns] == ["age", "hours", "sex", "job"]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.startswith("[clip]")])
def test_documented_clippings(block: str) -> None:
    assert read_clip(TomlText.parse(block).root().table("clip"))


def test_the_documented_configuration() -> None:
    made = Config.parse(BLOCKS[0], "mnist.toml")
    assert made.clip == Flat(cw.Abadi(10.0)) and made.data.inputs.pool == 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert Config.load(path.relative_to(ROOT)).output == Path("runs", Config.load(path).name)


def test_a_schedule_of_noise_is_read() -> None:
    made = config("privacy={noise_multiplier={10=1, 0=2.0}}")
    assert made.privacy.noise_multiplier == cw.Steps({0: 2.0, 10: 1.0}) and made.privacy.is_private
    assert config("privacy.noise_multiplier={0=2.0}").privacy.noise_multiplier == cw.Steps({0: 2.0})
    again = Config.parse(made.text)
    assert again.privacy == made.privacy
    assert config("privacy.noise_multiplier={0=2.0, 6=1.0}", "privacy.epsilon=3").privacy.epsilon == 3


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{}", cw.Independent()),
        ("{kind='banded', bands=4}", cw.Banded(4)),
        ("{kind='banded', bands=4, momentum=0.5}", cw.Banded(4, 0.5)),
        ("{kind='square-root', bands=3}", cw.SquareRoot(3)),
        ("{kind='tree'}", cw.Tree()),
    ],
)
def test_a_correlation_is_read_and_is_the_plans(table: str, expected: object) -> None:
    sampling = cw.Shuffled(500, 50, reshuffle=False)
    made = config(f"correlation={table}").algorithm.plan(cw.Plan(sampling, 5, cw.Abadi(1.0), 1.0))
    assert made.correlation == expected
