"""From results to a page and figures: `README.md`, and one SVG each for time, memory and growth.

Values are computed here and drawn as they are in `results.json`; a goal that is missed is shown as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import scaling
from benchmarks.measure import Json
from benchmarks.methods import MEASURED, METHODS
from benchmarks.workloads import WORKLOADS
from papers.pages import put

# Okabe and Ito: told apart by readers with any colour vision; the marks differ too
COLOURS = {
    "plain": "#000000",
    "clipwise": "#0072B2",
    "vmap": "#E69F00",
    "opacus_hooks": "#CC79A7",
    "opacus_ghost": "#009E73",
}
MARKS = {"plain": "|", "clipwise": "o", "vmap": "s", "opacus_hooks": "^", "opacus_ghost": "D"}
SHOWN = tuple(name for name in MEASURED if name != "plain")
OPACUS = ("opacus_hooks", "opacus_ghost")
FIRST_STEP_GOAL = 3.0

Value = Callable[[Json, str], float | None]


def time_ratio(entry: Json, method: str) -> float | None:
    """Median CPU time ratio to the plain step."""
    found = entry.get("steps", {}).get("time", {}).get(method)
    return None if found is None else float(found["cpu_ratio"]["median"])


def wall_ratio(entry: Json, method: str) -> float | None:
    """Median wall time ratio to the plain step."""
    found = entry.get("steps", {}).get("time", {}).get(method)
    return None if found is None else float(found["wall_ratio"]["median"])


def memory_ratio(entry: Json, method: str) -> float | None:
    """Peak memory increase in later steps, as a ratio to the plain step's."""
    found = entry.get("memory", {})
    if "later_bytes" not in found.get(method, {}) or "later_bytes" not in found.get("plain", {}):
        return None
    return float(found[method]["later_bytes"]) / float(found["plain"]["later_bytes"])


def number(value: float | None, digits: int = 2) -> str:
    """A number of the table, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def against(value: float | None, goal: float | None) -> str:
    """A number beside its goal, and whether it is met as printed."""
    if value is None or goal is None:
        return number(value)
    return f"{value:.2f} (goal {goal:.2f}: {'met' if round(value, 2) <= goal else '**missed**'})"


def quartiles(entry: Json, method: str) -> str:
    """Median with quartiles."""
    found = entry.get("steps", {}).get("time", {}).get(method)
    if found is None:
        return "–"
    ratio = found["cpu_ratio"]
    return f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def header(*cells: str) -> list[str]:
    """The head of a Markdown table."""
    return [row(*cells), row(*["---"] * len(cells))]


def measured(results: Json) -> Iterator[tuple[str, Json]]:
    """Workloads that were measured, in order."""
    workloads = results.get("workloads", {})
    return ((name, workloads[name]) for name in WORKLOADS if name in workloads)


def best_opacus(entry: Json, value: Value) -> float | None:
    """The better of Opacus' two modes."""
    found = [v for v in (value(entry, name) for name in OPACUS) if v is not None]
    return min(found) if found else None


def table(results: Json) -> str:
    """Time: CPU ratio to the plain step, median [quartiles] of the rounds."""
    titles = [METHODS[name].title for name in SHOWN[1:]]
    lines = header("workload", "clipwise", "goal", "clipwise, wall", *titles, "ahead of Opacus")
    for name, entry in measured(results):
        goal = WORKLOADS[name].goal
        mine, best = time_ratio(entry, "clipwise"), best_opacus(entry, time_ratio)
        ahead = "Opacus cannot run it" if best is None else "yes" if mine is not None and mine < best else "**no**"
        if mine is None:
            ahead = "not measured"
        verdict = (
            ""
            if goal is None or mine is None
            else f"{goal.time:.2f} {'met' if round(mine, 2) <= goal.time else '**missed**'}"
        )
        others = [quartiles(entry, method) for method in SHOWN[1:]]
        lines.append(
            row(
                WORKLOADS[name].title,
                quartiles(entry, "clipwise"),
                verdict,
                number(wall_ratio(entry, "clipwise")),
                *others,
                ahead,
            )
        )
    return "\n".join(lines)


def memory_table(results: Json) -> str:
    """Memory: ratio of the peak increases, and megabytes of the plain step."""
    titles = [METHODS[name].title for name in SHOWN[1:]]
    lines = header("workload", "plain, MB", "clipwise", "its first step", *titles)
    for name, entry in measured(results):
        goal, memory = WORKLOADS[name].goal, entry.get("memory", {})
        plain = memory.get("plain", {}).get("later_bytes")
        first = memory.get("clipwise", {}).get("first_bytes")
        mine = against(memory_ratio(entry, "clipwise"), goal.memory if goal else None)
        others = [number(memory_ratio(entry, method)) for method in SHOWN[1:]]
        beside = None if plain is None or first is None else first / plain
        lines.append(
            row(WORKLOADS[name].title, number(None if plain is None else plain / 1e6, 0), mine, number(beside), *others)
        )
    return "\n".join(lines)


def error_table(results: Json) -> str:
    """Largest relative error of a norm / relative error of the clipped sum, against the float64 loop."""
    lines = header("workload", *(METHODS[name].title for name in SHOWN))
    for name, entry in measured(results):
        found = entry.get("steps", {}).get("errors", {})
        cells = [f"{found[m]['norms']:.0e} / {found[m]['sum']:.0e}" if m in found else "–" for m in SHOWN]
        lines.append(row(WORKLOADS[name].title, *cells))
    return "\n".join(lines)


def first_step_table(results: Json) -> str:
    """The extra cost of the first step, in plain steps."""
    lines = header("workload", "extra cost of the first step, in plain steps")
    for name, entry in measured(results):
        if "steps" in entry:
            extra = entry["steps"]["first_step"]["extra_plain_steps"]
            lines.append(row(WORKLOADS[name].title, against(extra, FIRST_STEP_GOAL)))
    return "\n".join(lines)


def remarks(results: Json) -> str:
    """What could not run and what had to be adapted, in the peers' own words."""
    lines = []
    for name, entry in measured(results):
        steps = entry.get("steps", {})
        for method, reason in steps.get("cannot_run", {}).items():
            lines.append(f"- {WORKLOADS[name].title}: {METHODS[method].title} cannot run it: `{reason}`")
        for method, note in steps.get("notes", {}).items():
            lines.append(f"- {WORKLOADS[name].title}: {METHODS[method].title}: {note}")
        for method, timing in steps.get("time", {}).items():
            if timing["rounds"] == 1:
                lines.append(f"- {WORKLOADS[name].title}: {METHODS[method].title} was timed once, being so slow.")
    return "\n".join(lines) or "- none"


def lengths_section(results: Json) -> str:
    """Steps of sequence lengths met for the first time."""
    found = results.get("lengths")
    if not found:
        return "Not measured."
    lines = header("length", "met for the first time", "met again", "difference, in plain steps")
    for each in found["rows"]:
        lines.append(row(str(each["length"]), number(each["new"]), number(each["again"]), number(each["extra"])))
    return "\n".join(lines)


def _sizes(results: Json) -> Json:
    """What was measured at every size, smallest first."""
    found = results.get("scaling", {})
    return {point.key: found[point.key] for point in scaling.points() if point.key in found}


def scaling_table(results: Json) -> str:
    """Ratios at every size."""
    lines = header(
        "size", "plain, ms", "clipwise", "Opacus hooks", "Opacus ghost", "clipwise, memory", "Opacus best, memory"
    )
    for key, found in _sizes(results).items():
        timing, memory = found.get("time", {}), found.get("memory", {})
        ratios = [number(timing[m]["cpu_ratio"]["median"]) if m in timing else "–" for m in ("clipwise", *OPACUS)]
        plain = memory.get("plain")
        best = min((memory[m] for m in OPACUS if m in memory), default=None)
        parts = [memory.get("clipwise"), best]
        cells = ["–" if part is None or not plain else number(part / plain) for part in parts]
        lines.append(row(key, number(timing["plain"]["cpu_ms"], 1) if timing else "–", *ratios, *cells))
    return "\n".join(lines)


# Figures ---------------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "clipwise", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot as plt

    return plt


def draw_ratios(results: Json, value: Value, goal: Callable[[Any], float | None], label: str, path: Path) -> None:
    """One line of marks per workload, the goal as a vertical bar, the plain step at 1."""
    plt = _pyplot()
    entries = list(measured(results))
    figure, axes = plt.subplots(figsize=(7.5, 0.48 * len(entries) + 1.3), layout="constrained")
    axes.axvline(1.0, color="0.6", linewidth=1)
    for line, (name, entry) in enumerate(entries):
        y = len(entries) - 1 - line
        for method in SHOWN:
            ratio = value(entry, method)
            if ratio is not None:
                axes.plot(ratio, y, MARKS[method], color=COLOURS[method], markersize=7 if method == "clipwise" else 5)
        target = WORKLOADS[name].goal
        aim = goal(target) if target else None
        if aim is not None:
            axes.plot([aim, aim], [y - 0.3, y + 0.3], color="#D55E00", linewidth=2)
    for method in SHOWN:
        axes.plot([], [], MARKS[method], color=COLOURS[method], label=METHODS[method].title)
    axes.plot([], [], color="#D55E00", linewidth=2, label="goal of clipwise")
    axes.set_xscale("log")
    ticks = [0.5, 1, 1.5, 2, 3, 5, 10, 20]
    low, high = axes.get_xlim()
    axes.set_xticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(entries)), [WORKLOADS[name].title for name, _ in reversed(entries)])
    axes.set_xlabel(label)
    axes.grid(axis="x", color="0.9")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_scaling(results: Json, path: Path) -> None:
    """CPU time of a step against size, one panel per study."""
    plt = _pyplot()
    found = _sizes(results)
    studies = list(dict.fromkeys(key.split(" x")[0] for key in found))
    figure, panels = plt.subplots(1, max(1, len(studies)), figsize=(11, 2.9), layout="constrained", squeeze=False)
    for axes, study in zip(panels[0], studies, strict=False):
        for method in ("plain", "clipwise", *OPACUS):
            pairs = [
                (int(key.split(" x")[1]), point["time"][method]["cpu_ms"])
                for key, point in found.items()
                if key.startswith(f"{study} x") and method in point.get("time", {})
            ]
            xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
            mark = "" if method == "plain" else MARKS[method]
            axes.plot(xs, ys, color=COLOURS[method], marker=mark, markersize=4, label=METHODS[method].title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        factors = sorted({int(key.split(" x")[1]) for key in found if key.startswith(f"{study} x")})
        axes.set_xticks(factors, [f"×{f}" for f in factors])
        low, high = axes.get_ylim()
        ticks = [d * 10**k for k in range(6) for d in (1, 2, 5) if low <= d * 10**k <= high]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_yticks([], minor=True)
        axes.set_xlabel("times the smallest size")
        axes.set_title(study)
        axes.grid(color="0.92")
    panels[0][0].set_ylabel("CPU time of a step, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


# The page --------------------------------------------------------------------------------------------------------

PAGE = """\
Ratios to the plain, non-private step (forward, mean loss, backward, SGD) of the same model in the same run; 1.00 means
that privacy is free. A clipwise step is all of `Private.step`: clipping, ledger, noise, optimizer.

{about}

### Time

CPU time of the process, median [quartiles] over interleaved rounds in one process, methods in shuffled order, warm-up
not counted. The wall ratio is beside it.

![time ratios](time.svg)

{time}

### Peak memory

Ratio of the increases of resident memory over the state just before the first step, each method in a fresh process. The
kernel's high-water mark is reset before the step; the allocator is set to return every freed block of 64 kB or more
(`MALLOC_MMAP_THRESHOLD_`, one arena), so resident memory follows what is alive. A step on a tiny model comes first, so
that libraries loaded on first use do not count. "First step" is the one that plans and checks.

![memory ratios](memory.svg)

{memory}

### Correctness

Against one backward pass per sample in float64, 4 samples: largest relative error of a norm / relative error of the
clipped sum. All methods compute in float32.

{errors}

### The first step

Planning and checking happen on the first step of a model.

{first}

Sequence lengths that vary from batch to batch (BERT width, 3 layers, batch 4; ratios to the plain step of the same
length): a length that was never met must not cost more than one that was.

{lengths}

### Growth

A BERT, everything trained; size x1 is batch 4, length 64, width 128,
2 layers, 1,000 words. Ratios to the plain step.

![growth](scaling.svg)

{scaling}

### Peers

{remarks}
"""


def conditions(results: Json) -> Iterator[Json]:
    """Revision and load of every measurement; a run that was resumed may have several revisions."""
    for key, value in results.items():
        if key == "conditions":
            yield value
        elif isinstance(value, dict):
            yield from conditions(value)


def about(results: Json) -> str:
    """Machine, versions, date and command."""
    settings, versions, machine = results.get("settings", {}), results["versions"], results["machine"]
    packages = ", ".join(f"{name} {found}" for name, found in versions.items())
    found = list(conditions(results))
    loads = [each["load"] for each in found if each["load"] is not None]
    busy = f" Load average seen while measuring: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    revisions = sorted({each["revision"] for each in found if each["revision"]})
    where = f" at revision {', '.join(revisions)}" if revisions else ""
    return (
        f"Measured {results.get('date', '')}{where} on {machine['cores']} cores of {machine['cpu']}, "
        f"{settings.get('threads', 1)} thread, Python {machine['python']}, {packages}.{busy}\n\n"
        "Command: `python -m benchmarks` (`make bench`). It resumes when interrupted; `--again` measures all again, "
        "`--again engine` all but the memory of the other methods. Numbers: `results.json`. A dash means not measured."
    )


def page(results: Json) -> str:
    """What README.md says of a step."""
    return PAGE.format(
        about=about(results),
        time=table(results),
        memory=memory_table(results),
        errors=error_table(results),
        first=first_step_table(results),
        lengths=lengths_section(results),
        scaling=scaling_table(results),
        remarks=remarks(results),
    )


def write(results: Json, folder: Path) -> None:
    """The part of README.md and the figures."""
    put(folder / "README.md", "steps", page(results))
    draw_ratios(results, time_ratio, lambda goal: goal.time, "CPU time, ratio to the plain step", folder / "time.svg")
    draw_ratios(
        results, memory_ratio, lambda goal: goal.memory, "peak memory, ratio to the plain step", folder / "memory.svg"
    )
    if results.get("scaling"):
        draw_scaling(results, folder / "scaling.svg")
