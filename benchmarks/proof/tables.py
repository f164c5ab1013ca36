"""The tables of the study's report, from its results."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proof import intervals
from proof.curves import largest_of
from proof.study import SEED

Results = dict[str, Any]
ROWS = {
    "plain": "plain",
    "knn-lm": "kNN-LM",
    "adaptive, nearest only": "nearest contexts",
    "adaptive, exact only": "exact matches",
    "adaptive": "both",
}
"""Rows of the curves, by their names in the figures of a memory."""
_OVERLAPS = ("16", "64")
"""Lengths of exact matches for which the share of test is shown."""


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


def perplexities(documents: Mapping[str, Sequence[float]]) -> dict[str, dict[str, intervals.Interval]]:
    """Returns the perplexity of every row and its change, with their intervals."""
    return intervals.of_perplexities(documents, SEED)


def curve_table(found: Results) -> str:
    """Returns the perplexities of all memories, and the change that both sources bring."""
    rows = []
    for name, domain in found.items():
        for point in domain["points"]:
            each = perplexities(point["documents"])
            values = [f"{each[row]['perplexity'].value:.2f}" if row in each else "-" for row in ROWS]
            exact = f"{point['exact']:,}{'' if point['wanted']['exact'] else ' (core)'}"
            counts = [f"{point['keys']:,}", exact, f"{point['learned_from']:,}"]
            counts.append(str(len(point["documents"]["tokens"])))
            overlaps = [f"{100 * point['overlap'][length]:.1f}%" for length in _OVERLAPS]
            seconds = f"{point['clock']['core_seconds']:,.0f}"
            rows.append([name, *counts, *overlaps, *values, in_percent(each["adaptive"]["change"]), seconds])
    heads = ["domain", "keys", "exact", "learned from", "test documents"]
    heads += [f"copied for {length} tokens" for length in _OVERLAPS]
    heads += [*ROWS.values(), "both, change in %", "core-seconds"]
    return table(heads, rows) + "\n" + median_line(found)


def median_line(found: Results) -> str:
    """Returns the change on the median domain, each with its largest memory."""
    largest = {name: largest_of(domain["points"])["documents"] for name, domain in found.items()}
    middle = intervals.of_median_change([*largest.values()], "adaptive", SEED)
    changes = {name: perplexities(documents)["adaptive"]["change"].value for name, documents in largest.items()}
    each = ", ".join(f"{name} {100 * changes[name]:+.1f}%" for name in sorted(changes, key=lambda name: changes[name]))
    return f"Median domain, each with its largest memory: {in_percent(middle)}% ({each}); domains are drawn too.\n"


def beside_table(found: Results) -> str:
    """Returns the perplexities of all systems by domain, below them their costs, and how LoRA was tuned."""
    names = dict.fromkeys(row for each in found.values() for row in each["documents"] if row != "tokens")
    documents = [each["documents"] for each in found.values()]
    each_row = {name: perplexities(each["documents"]) for name, each in found.items()}
    rows = []
    for row in names:
        cells = []
        for each in each_row.values():
            change = in_percent(each[row]["change"]) if row in each else "-"
            cells += [f"{each[row]['perplexity'].value:.2f}" if row in each else "-", change]
        everywhere = row != "plain" and all(row in each for each in documents)
        median = in_percent(intervals.of_median_change(documents, row, SEED)) if everywhere else "-"
        title = f"memory, {ROWS[row]}" if row in ROWS and row != "plain" else row
        rows.append([title, *cells, median])
    counts = {name: len(each["documents"]["tokens"]) for name, each in found.items()}
    heads = [head for name, count in counts.items() for head in (f"{name} ({count} documents)", "change in %")]
    return "\n".join(
        [table(["", *heads, "median change in %"], rows), _cost_table(found), _speed_table(found), _tuning_table(found)]
    )


def _seconds(spread: Mapping[str, float]) -> str:
    """Returns the median and the range of some times."""
    return f"{spread['median']:.3f} ({spread['least']:.3f} to {spread['most']:.3f})"


def _cost_table(found: Results) -> str:
    """Returns what the systems take to build, and to change by a document."""
    rows, again = [], ["train again", "train again"]
    for name, each in found.items():
        lora, times, rag = each["lora"], each["seconds_of_a_document"], each["rag"]
        anew = f"{_seconds(times['rag_index'])}, index anew"
        changing = {
            "memory": (each["attaching"]["core_seconds"], _seconds(times["add"]), _seconds(times["forget"])),
            "LoRA, equal cost": (lora["equal"]["core_seconds"], *again),
            "LoRA, until it stops": (lora["until it stops"]["core_seconds"], *again),
            "RAG": (rag["index_core_seconds"], anew, anew),
        }
        rows += [[name, system, f"{cost:,.1f}", *changes] for system, (cost, *changes) in changing.items()]
        ours = _seconds(times["index_added"]), _seconds(times["index_forgot"])
        rows.append([name, "our index of passages", "-", *ours])
    return table(["domain", "", "core-seconds to build", "seconds to add a document", "to forget it"], rows)


def _speed_table(found: Results) -> str:
    """Returns tokens per second; LoRA is merged, so its speed is that of the plain model."""
    systems = dict.fromkeys(system for each in found.values() for system in each["tokens_per_second"])
    rows = []
    for system in systems:
        speeds = [each["tokens_per_second"].get(system) for each in found.values()]
        rows.append([system, *("-" if speed is None else f"{speed:.1f}" for speed in speeds)])
    return table(["tokens per second", *found], rows)


def _tuning_table(found: Results) -> str:
    """Returns the settings that were best on dev, and whether more training helped LoRA."""
    rows = []
    for name, each in found.items():
        lora, best = each["lora"], each["rag"]["tried"][0]["settings"]
        runs = [lora["equal"], lora["until it stops"]]
        settings = [f"rank {run['settings']['rank']}, rate {run['settings']['rate']:.2g}" for run in runs]
        epochs = [f"{run['tokens'] / each['tokens_in_memory']:.1f} passes" for run in runs]
        losses = [f"{run['dev_before']:.3f} to {run['dev']:.3f}" for run in runs]
        lora_cells = [f"{a}; {b}; {c}" for a, b, c in zip(settings, epochs, losses)]
        retrieved = f"{best['passages']} passages, query of {best['query']}, k1 {best['k1']}, b {best['b']}"
        rows.append([name, *lora_cells, "yes" if lora["stopped"] else "no", retrieved])
    heads = ["domain", "LoRA, equal cost (loss on dev)", "LoRA, until it stops", "stopped improving", "RAG"]
    return table(heads, rows)


def question_table(found: Results) -> str:
    """Returns the scores of all ways to answer, differences between them, and what was tuned."""
    ways = found["ways"]
    names = list(next(iter(ways.values()))["figures"])
    rows = [[name, *(shown(each["figures"][name]) for each in ways.values())] for name in names]
    counted = list(next(iter(ways.values()))["counts"])
    rows += [[f"number: {name}", *(str(each["counts"][name]) for each in ways.values())] for name in counted]
    forms = [f"{each['settings']['form']}, {each['settings']['passages']} passages" for each in ways.values()]
    text = (
        f"{found['reported_on']} questions on {found['paragraphs']} paragraphs. Forms and numbers of passages were "
        f"chosen on {found['tuned_on']} questions of other articles, for passages alone and for the token memory "
        "alone.\n"
    )
    return "\n".join(
        [table(["", *ways], [["form", *forms], *rows]), _difference_table(found), _tried_table(found), text]
    )


def _difference_table(found: Results) -> str:
    """Returns the paired differences between ways."""
    pairs = found["differences"]
    names = list(next(iter(pairs.values())))
    rows = [[pair, *(shown(each[name], 3, signed=True) for name in names)] for pair, each in pairs.items()]
    return table(["paired difference", *names], rows)


def _tried_table(found: Results) -> str:
    """Returns the figures of all forms on the questions that were tuned on."""
    measures = [name for name in found["tried"][0] if name != "settings"]
    rows = []
    for each in found["tried"]:
        settings = each["settings"]
        uses = "token memory" if settings["memory"] else f"{settings['passages']} passages"
        rows.append([settings["form"], uses, *(f"{each[name]:.3f}" for name in measures)])
    return table(["form (tuning)", "with", *measures], rows)


def harms(found: Results) -> dict[str, Results]:
    """Returns the changes of perplexity by text."""
    return {f"{found['memory']} (its own)": found["own"], **found["texts"], "GSM8K, solutions": found["gsm8k"]}


def harm_table(found: Results) -> str:
    """Returns perplexities and accuracies without a memory and with each."""
    memories = list(found["memories"])
    rows = []
    for name, each in harms(found).items():
        cells = [name, str(each["documents"]), f"{each['tokens']:,.0f}", shown(each["off"])]
        for memory in memories:
            on = each["on"][memory]
            cells += [f"{on['perplexity']['value']:.2f}", shown(on["percent"], signed=True)]
        rows.append(cells)
    heads = ["perplexity", "documents", "tokens", "memory off"]
    heads += [head for memory in memories for head in (memory, "change in %")]
    held = [f"{name}: {each['keys']:,} keys, {each['exact']:,} exact" for name, each in found["memories"].items()]
    return "\n".join([table(heads, rows), _task_table(found["piqa"]), f"Memories: {'; '.join(held)}.\n"])


def _task_table(piqa: Results) -> str:
    """Returns the accuracy at PIQA, how many answers changed, and the change of the margin."""
    rows = []
    for measure in ("accuracy", "accuracy by token"):
        for memory, on in piqa[measure]["on"].items():
            cells = [shown(piqa[measure]["off"], 3), shown(on["accuracy"], 3), shown(on["points"], signed=True)]
            flips = [str(on["to right"]), str(on["to wrong"]), shown(on["margin"], 3, signed=True)]
            rows.append([f"PIQA, {measure}", memory, str(piqa["problems"]), *cells, *flips])
    heads = ["", "memory", "problems", "memory off", "memory on", "change in points"]
    return table([*heads, "wrong to right", "right to wrong", "change of the margin in nats"], rows)


def forgetting_table(found: Results) -> str:
    """Returns how far memories that forgot differ from those that never held, and the membership test."""
    rows, tests = [], []
    counts = {"added": found["documents"], "trained": found["trained"]}
    titles = {"added": "added, then forgotten", "trained": "training documents, forgotten"}
    for kind, parts in found["kinds"].items():
        for name, title in titles.items():
            differ = parts[name]["differences"]
            equal = "yes" if differ["equal_to_the_bit"] else "no"
            same = [f"{100 * differ[each]:.0f}%" for each in ("same_answers", "same_citations")]
            largest = f"{differ['largest_difference_of_a_probability']:.1e}"
            rows.append([kind, title, str(counts[name]), equal, largest, *same])
            for state, each in parts[name]["states"].items():
                values = [f"{100 * each['first']:.1f}%", f"{each['geometric mean']:.1f}", shown(each["membership"], 3)]
                tests.append([kind, title, state, *values, shown(each["beyond never held"], 3, signed=True)])
    heads = ["index", "documents", "number", "equal to the bit", "largest difference of a probability"]
    test_heads = ["index", "documents", "state", "true token ranks first", "geometric mean of ranks"]
    test_heads += ["membership (0.5: not told)", "beyond never held"]
    text = "Both memories of training documents have the mixture that learned from these documents too.\n"
    return "\n".join([table([*heads, "same answers", "same citations"], rows), table(test_heads, tests), text])
