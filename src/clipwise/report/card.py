"""The privacy and calibration card: a short Markdown text to publish with a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import clipwise
from clipwise.accounting import CHANGED_DATA, EARLIER, INTERRUPTED, Event, Guarantee, neighbours
from clipwise.calibration import metric_named
from clipwise.correlation import Independent
from clipwise.plan import Plan
from clipwise.report.arms import ArmResults, arms_of
from clipwise.report.content import headline
from clipwise.report.folder import LEDGER
from clipwise.report.run import NEW_WEIGHTS, Run
from clipwise.report.warnings import HELD_OUT, JUDGED, ended_early, without_noise
from clipwise.report.wording import interval_text, plan_rows, value_text

__all__ = ["card"]

_PHRASES = {
    INTERRUPTED: INTERRUPTED,
    CHANGED_DATA: f"on {CHANGED_DATA}",
    "federated": "of federated training",
    "repeated": "repeated",
}


def card(runs: Run | Iterable[Run], ledger: str = LEDGER) -> str:
    """The card of a run, or of the seeds of one arm, as Markdown; `ledger` names the file that verifies its epsilon.

    Guarantees: it says nothing that was computed from the private training data without noise, and no seed.
    """
    given = [runs] if isinstance(runs, Run) else list(runs)
    (arm,) = arms_of(run.publishable() for run in given)
    first = arm.first
    lines = [f"# Privacy and calibration card: {_text(arm.name)}", "", "## Privacy", "", *_privacy(arm.dearest, ledger)]
    if len(arm.runs) > 1:
        lines += ["", f"This holds for each of {len(arm.runs)} runs alone. Publishing several of them costs more."]
    lines += ["", "## Quality of the predictions", "", *_quality(arm), ""]
    held_out = f"Measured on {first.test.count:,} held-out records"
    data = first.provenance.get("data")
    name = data.get("name") if isinstance(data, Mapping) else data
    measured = f"{held_out}{f' of {_text(str(name))}' if name else ''}."
    lines += [f"{measured} {HELD_OUT if first.is_known else JUDGED}"]
    planned = plan_rows(first.plan, first.choices)
    if planned:
        lines += ["", "## Training", "", *(f"- {_text(label)}: {_text(value)}" for label, value in planned)]
    warnings = dict.fromkeys(text for run in arm.runs for text in (*ended_early(run), *run.warnings))
    if warnings:
        lines += ["", "## Warnings", "", *(f"- {_text(text)}" for text in warnings)]
    return "\n".join([*lines, "", f"Made by clipwise {clipwise.__version__}.", ""])


def _privacy(run: Run, ledger: str) -> list[str]:
    if not run.is_known:
        return ["**Unknown.** These predictions were only judged: nothing is known of the training."]
    if not run.is_private:
        return [f"**Not private.** {without_noise(run)}: no epsilon holds for this model."]
    rows = ["| accountant | epsilon | kind |", "| --- | ---: | --- |"]
    rows += [f"| {name} | {g.printed} | {g.kind} |" for name, g in run.guarantees.items()]
    best = next(iter(run.guarantees.values()), None)
    if best is None:
        return rows
    facts = [f"- **{label}:** {text}" for label, text in _facts(run, best, ledger).items()]
    return [best.statement(), "", *rows, "", *facts]


def _facts(run: Run, best: Guarantee, ledger: str) -> dict[str, str]:
    """The points that checklists for reporting ask for: Ponomareva et al. 2023 (section 5.3.3), NIST SP 800-226."""
    events = () if run.ledger is None else run.ledger.events
    users = best.unit == "client"
    spent = _spent(events, "rounds" if users else "steps")
    own = any(getattr(event, "own_batches", False) for event in events)
    versions = run.provenance.get("versions")
    tools = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else ""
    found = {
        "Protected unit": "one user, with all its records"
        if users
        else f"one {_text(best.unit)}, a record of the data; a person with several records is protected less",
        "Neighbouring data": neighbours(best.relation, best.unit),
        "Setting": (
            "central: the server sees every user's update, and the promise is about what it releases"
            if users
            else "central: those who train see the records, and the promise is about what they release"
        ),
        "Mechanism": f"{_text(run.choices.algorithm or 'dp-sgd')}, {_noise(run)}; settings in the section Training",
        "Released": (
            f"the noisy sums of every {'round' if users else 'step'}, so all weights on the way and at the end, and "
            "whatever is computed from them without the data"
        ),
        "Accounting": f"{_text(best.accountant)} ({best.kind}); assumes {_text(best.sampling)}"
        + ("; the batches were drawn by the caller, who vouches for it" if own else ""),
        "All that touched the data": f"{spent}. Warnings below name what is known not to be on it",
        "Tuning": (
            "not on the ledger. If settings were chosen by other runs on these records, those runs cost privacy that "
            "this epsilon leaves out"
        ),
        "Model": f"{_text(str(run.provenance.get('model', 'not stated')))}; {_first_weights(run)}",
        "Not covered": "metrics on held-out records, time and memory used, and anything not on the ledger",
        "Trust": (
            "who may see the records, and how they are collected, stored and guarded, is up to those who train; no "
            "epsilon covers it"
        ),
        "Small groups": (
            "the metrics below are averages. Clipping and noise often cost small groups more accuracy than others, and "
            "that was not measured"
        ),
        "Verification": (
            f"`clipwise epsilon --ledger {ledger} --delta {best.delta:g}` computes this epsilon again; clipwise is "
            "open source (Apache-2.0)"
        ),
    }
    checked = run.provenance.get("other_samples")
    if checked:
        found["Samples apart"] = f"whether a sample's loss depends on other samples was {_text(str(checked))}"
    if tools:
        found["Tools"] = _text(f"{tools}; noise: {run.provenance.get('noise', 'not stated')}")
    return {label: f"{text}." for label, text in found.items()}


def _noise(run: Run) -> str:
    """Which noise, and how it depends on that of earlier steps."""
    plan = run.plan
    if not isinstance(plan, Plan) or plan.correlation == Independent():
        return "Gaussian noise"
    said = plan.correlation.describe()
    return f"Gaussian noise that is correlated over steps ({said[0].lower()}{said[1:-1]})"


def _spent(events: Sequence[Event], steps: str) -> str:
    """What is on the ledger, by the reasons."""
    counts: dict[tuple[str, str], int] = {}
    for event in events:
        key = steps if event.trains else "releases", event.reason
        counts[key] = counts.get(key, 0) + event.count
    listed = [
        f"{count:,} {what.removesuffix('s') if count == 1 else what} {_for(reason)}"
        for (what, reason), count in counts.items()
    ]
    said = f"the ledger has {'; '.join(listed)}"
    if not any(reason == INTERRUPTED for _, reason in counts):
        return said
    return f"{said}. Interrupted {steps} were begun before a stop or a crash: they are charged, their results not used"


def _for(reason: str) -> str:
    """What releases were for, as the end of a phrase.

    >>> _for("training"), _for("earlier run, changed data"), _for("interrupted")
    ('for training', 'of an earlier run, changed data', 'interrupted')
    """
    if reason.startswith(EARLIER):
        return f"of an {_text(reason)}"
    return _PHRASES.get(reason, f"for {_text(reason)}")


def _first_weights(run: Run) -> str:
    found = run.provenance.get("first_weights")
    if found == NEW_WEIGHTS:
        return "its first weights were drawn at random"
    if not isinstance(found, Mapping):
        return "where its first weights come from is not known here, and what they were trained on is not covered"
    said = []
    if "continues" in found:
        said.append(
            f"it continues {_text(str(found['continues']))}, whose releases are on its ledger and in its epsilon"
        )
    if "from" in found:
        origin, tensors = (_text(str(found.get(name, "not stated"))) for name in ("from", "tensors"))
        said.append(
            f"its first weights are those of {origin} ({tensors}), which this epsilon does not cover: see Warnings"
        )
    return "; ".join(said)


def _quality(arm: ArmResults) -> list[str]:
    several = len(arm.runs) > 1
    rows = [f"| metric | {'mean' if several else 'value'} | 95 % interval |", "| --- | ---: | ---: |"]
    for name in headline([arm]):
        estimate = arm.estimates[name]
        interval = interval_text(name, estimate) or "–"
        rows.append(f"| {metric_named(name).heading} | {value_text(name, estimate)} | {interval} |")
    return rows


def _text(text: str) -> str:
    r"""A text on one line that Markdown does not take for markup.

    >>> _text("R = 1 | *large* <b>")
    'R = 1 \\| \\*large\\* &lt;b>'
    """
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", line)
