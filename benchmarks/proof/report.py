"""The study's report: a table and a picture of each part, from its results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proof import intervals
from proof.study import SEED
from spalm.files import write_atomically
from spalm.study.drawing import COLOURS, HIT, LOSS, Axes, draw_figure, save_figure

Results = dict[str, Any]
ROWS = {
    "plain": "plain",
    "knn-lm": "kNN-LM",
    "adaptive, nearest only": "nearest contexts",
    "adaptive, exact only": "exact matches",
    "adaptive": "both",
}
"""Rows of the curves, by their names in the figures of a memory."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(interval: Mapping[str, float], digits: int = 2, *, signed: bool = False) -> str:
    """Returns a figure with its interval."""
    if not np.isfinite(interval["value"]):
        return "-"
    form = f"{'+' if signed else ''}.{digits}f"
    return f"{interval['value']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def in_percent(interval: intervals.Interval, digits: int = 1) -> str:
    """Returns a change with its interval, in per cent."""
    percent = {name: 100 * getattr(interval, name) for name in ("value", "low", "high")}
    return shown(percent, digits, signed=True)


def _perplexities(documents: dict[str, list[float]]) -> dict[str, dict[str, intervals.Interval]]:
    return intervals.of_perplexities(documents, SEED)


def curve_table(found: Results) -> str:
    """Returns the perplexities of all memories, and the change that both sources bring."""
    rows = []
    for name, domain in found.items():
        for point in domain["points"]:
            each = _perplexities(point["documents"])
            values = [f"{each[row]['perplexity'].value:.2f}" if row in each else "-" for row in ROWS]
            counts = [f"{point['keys']:,}", f"{point['exact']:,}", str(len(point["documents"]["tokens"]))]
            seconds = f"{point['clock']['core_seconds']:,.0f}"
            rows.append([name, *counts, *values, in_percent(each["adaptive"]["change"]), seconds])
    heads = ["domain", "keys", "exact", "test documents", *ROWS.values(), "both, change in %", "core-seconds"]
    return table(heads, rows) + "\n" + median_line(found)


def median_line(found: Results) -> str:
    """Returns the change on the median domain, each with its largest memory."""
    changes = []
    for name, domain in found.items():
        largest = max(domain["points"], key=lambda point: (point["exact"], point["keys"]))
        changes.append((_perplexities(largest["documents"])["adaptive"]["change"].value, name))
    middle = float(np.median([change for change, _ in changes]))
    each = ", ".join(f"{name} {100 * change:+.1f}%" for change, name in sorted(changes))
    return f"Median domain, each with its largest memory: {100 * middle:+.1f}% ({each}).\n"


def draw_curves(found: Results) -> Callable[[Axes], None]:
    """Returns what draws the change in perplexity by the number of entries with keys."""

    def draw(axes: Axes) -> None:
        for number, (name, domain) in enumerate(found.items()):
            most = max(point["exact"] for point in domain["points"])
            points = sorted((point for point in domain["points"] if point["exact"] == most), key=lambda p: p["keys"])
            changes = [_perplexities(point["documents"])["adaptive"]["change"] for point in points]
            colour = COLOURS[number % len(COLOURS)]
            style = "o-" if number < len(COLOURS) else "s--"
            keys = [point["keys"] for point in points]
            axes.plot(keys, [100 * each.value for each in changes], style, color=colour, label=name)
            axes.fill_between(
                keys,
                [100 * each.low for each in changes],
                [100 * each.high for each in changes],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
        axes.set_xscale("log")
        axes.set_xlabel("entries with keys")
        axes.set_ylabel("change in perplexity, %")
        axes.legend(fontsize="small")

    return draw


def beside_table(found: Results) -> str:
    """Returns the perplexities of all systems by domain, and below them their costs."""
    names = [row for row in next(iter(found.values()))["documents"] if row != "tokens"]
    perplexities = {name: _perplexities(each["documents"]) for name, each in found.items()}
    rows = []
    for row in names:
        cells = []
        for each in perplexities.values():
            change = in_percent(each[row]["change"]) if row in each else "-"
            cells += [f"{each[row]['perplexity'].value:.2f}" if row in each else "-", change]
        rows.append([row, *cells])
    heads = ["", *(head for name in found for head in (name, "change in %"))]
    costs = []
    for name, each in found.items():
        lora, rag, seconds = each["lora"], each["rag"], each["seconds_of_a_document"]
        speeds = each["tokens_per_second"]
        train = lora["equal"]["core_seconds"], lora["until it stops"]["core_seconds"]
        attach = each["attaching"]["core_seconds"]
        costs += [
            [
                name,
                "memory",
                f"{attach:,.0f}",
                f"{speeds['ours']:.1f}",
                f"{seconds['add']:.2f}",
                f"{seconds['forget']:.3f}",
            ],
            [name, "LoRA, equal cost", f"{train[0]:,.0f}", f"{speeds['plain']:.1f}", "train again", "train again"],
            [name, "LoRA, until it stops", f"{train[1]:,.0f}", f"{speeds['plain']:.1f}", "train again", "train again"],
            [
                *(name, "RAG", f"{rag['index_core_seconds']:.1f}", f"{speeds['RAG']:.1f}"),
                *[f"{seconds['rag_index']:.2f} (index anew)"] * 2,
            ],
        ]
    cost_heads = ["domain", "", "core-seconds to build", "tokens/s", "seconds to add a document", "to forget it"]
    return table(heads, rows) + "\n" + table(cost_heads, costs)


def draw_beside(found: Results) -> Callable[[Axes], None]:
    """Returns what draws the change in perplexity of every system."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(found)
        for number, (name, each) in enumerate(found.items()):
            changes = {row: each["change"] for row, each in _perplexities(each["documents"]).items() if row != "plain"}
            _bars(
                axes, list(changes.values()), number * width, width, label=name, colour=COLOURS[number % len(COLOURS)]
            )
            axes.set_yticks(np.arange(len(changes)) + 0.4 - width / 2, list(changes))
        axes.set_xlabel("change in perplexity, %")
        axes.invert_yaxis()
        axes.legend(fontsize="small")

    return draw


def _bars(axes: Axes, values: list[intervals.Interval], shift: float, width: float, *, label: str, colour: str) -> None:
    """Draws changes as bars with their intervals."""
    middle = np.array([100 * each.value for each in values])
    low, high = (np.array([100 * getattr(each, name) for each in values]) for name in ("low", "high"))
    places = np.arange(len(values)) + shift
    axes.barh(places, middle, width, xerr=[middle - low, high - middle], color=colour, label=label)


def question_table(found: Results) -> str:
    """Returns the scores of all ways to answer, and what was tuned."""
    names = list(next(iter(found["ways"].values()))["figures"])
    rows = [[way, *(shown(each["figures"][name]) for name in names)] for way, each in found["ways"].items()]
    chosen = found["chosen"]
    text = (
        f"{found['reported_on']} questions; form ({chosen['form']}) and number of passages ({chosen['passages']}) were "
        f"chosen on {found['tuned_on']} questions of other articles.\n"
    )
    return table(["", *names], rows) + "\n" + text


def draw_questions(found: Results) -> Callable[[Axes], None]:
    """Returns what draws exact match and F1 of all ways to answer."""

    def draw(axes: Axes) -> None:
        for number, measure in enumerate(("exact match", "F1")):
            values = [intervals.Interval(**each["figures"][measure]) for each in found["ways"].values()]
            _bars(axes, values, number * 0.4, 0.4, label=measure, colour=COLOURS[number])
        axes.set_yticks(np.arange(len(found["ways"])) + 0.2, list(found["ways"]))
        axes.set_xlabel("per cent of questions")
        axes.invert_yaxis()
        axes.legend(fontsize="small")

    return draw


def _harms(found: Results) -> dict[str, Results]:
    return {f"{found['memory']} (its own)": found["own"], **found["texts"], "GSM8K solutions": found["gsm8k"]}


def harm_table(found: Results) -> str:
    """Returns perplexities and accuracies off and on."""
    rows = [
        [name, str(each["documents"]), shown(each["off"]), shown(each["on"]), shown(each["percent"], signed=True)]
        for name, each in _harms(found).items()
    ]
    heads = ["perplexity", "documents", "memory off", "memory on", "change in %"]
    tasks = []
    for measure in ("accuracy", "accuracy by token"):
        each = found["piqa"][measure]
        cells = [shown(each[name], 3) for name in ("off", "on")]
        tasks.append([f"PIQA, {measure}", str(found["piqa"]["problems"]), *cells, shown(each["points"], signed=True)])
    task_heads = ["", "problems", "memory off", "memory on", "change in points"]
    return table(heads, rows) + "\n" + table(task_heads, tasks)


def draw_harm(found: Results) -> Callable[[Axes], None]:
    """Returns what draws the change in perplexity of everything that is not the memory's domain."""

    def draw(axes: Axes) -> None:
        others = {name: each["percent"] for name, each in _harms(found).items() if "own" not in name}
        for number, each in enumerate(others.values()):
            colour = LOSS if each["value"] > 1 else HIT
            axes.plot([each["low"], each["high"]], [number, number], color=colour)
            axes.plot(each["value"], number, "o", color=colour)
        axes.axvline(1, linestyle=":", color="grey")
        axes.set_yticks(range(len(others)), list(others))
        axes.set_xlabel("change in perplexity with the memory, % (dotted: the limit)")
        axes.invert_yaxis()

    return draw


def forgetting_table(found: Results) -> str:
    """Returns how far memories that forgot differ from those that never held, and the membership test."""
    rows, tests = [], []
    for kind, each in found["kinds"].items():
        for name, title in (("added", "added, then forgotten"), ("trained", "training documents, forgotten")):
            differ = each[name]["differences"]
            rows.append(
                [
                    *(kind, title, "yes" if differ["equal_to_the_bit"] else "no"),
                    f"{differ['largest_difference_of_a_probability']:.1e}",
                    *(f"{100 * differ[same]:.0f}%" for same in ("same_answers", "same_citations")),
                ]
            )
        for state, ranks in each["added"]["ranks"].items():
            values = f"{100 * ranks['first']:.1f}%", f"{ranks['geometric mean']:.1f}"
            tests.append([kind, state, *values, f"{each['added']['membership'][state]:.3f}"])
    heads = [
        "index",
        "documents",
        "equal to the bit",
        "largest difference of a probability",
        "same answers",
        "same citations",
    ]
    test_heads = ["index", "memory", "true token ranks first", "geometric mean of ranks", "membership (0.5: not told)"]
    return table(heads, rows) + "\n" + table(test_heads, tests)


def draw_forgetting(found: Results) -> Callable[[Axes], None]:
    """Returns what draws how often the true token ranks first."""

    def draw(axes: Axes) -> None:
        for number, (kind, each) in enumerate(found["kinds"].items()):
            ranks = each["added"]["ranks"]
            places = np.arange(len(ranks)) + 0.4 * number
            axes.bar(places, [100 * rank["first"] for rank in ranks.values()], 0.4, label=f"{kind} index")
            axes.set_xticks(np.arange(len(ranks)) + 0.2, list(ranks))
        axes.set_ylabel("true token ranks first, %")
        axes.legend(fontsize="small")

    return draw


TITLES: dict[str, tuple[str, Callable[[Results], str], Callable[[Results], Callable[[Axes], None]]]] = {
    "curves": ("Perplexity by size of the memory", curve_table, draw_curves),
    "beside": ("Beside LoRA and retrieval into the context", beside_table, draw_beside),
    "questions": ("Questions", question_table, draw_questions),
    "harm": ("What the memory does to everything else", harm_table, draw_harm),
    "forgetting": ("Forgetting", forgetting_table, draw_forgetting),
}
"""Title, table and picture of each part."""


def write_report(directory: Path, results: dict[str, Results]) -> None:
    """Writes report.md, and a picture of each part that has results."""
    text = "# Proof\n\nIntervals hold 95 of 100 bootstrap draws over documents, questions or problems.\n"
    for name, (title, in_table, picture) in TITLES.items():
        if name in results:
            save_figure(draw_figure(picture(results[name]), 6.5, 3.8), directory / name)
            text += f"\n## {title}\n\n{in_table(results[name])}\n![{title}]({name}.svg)\n"
    write_atomically(directory / "report.md", text.encode())
