"""A run as one page: results, curves, every figure with its caption, passages, settings, digests.

The page holds everything it needs. It opens from disk, fetches nothing and runs nothing.
"""

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup

import spalm
from spalm.artifact import MANIFEST, PREVIOUS, Artifact
from spalm.console import bar
from spalm.corpus import token_in_text, visible_token
from spalm.digests import updating_sums
from spalm.files import entries_below, own_folder, write_atomically
from spalm.runs import REFERENCE_ROW, FinishedRun, RowName, key_network_note
from spalm.runs.passage import retrieved_tokens
from spalm.study.analysis import Analysis, AnalysisRequest, format_cell
from spalm.study.drawing import inline_svg
from spalm.study.registry import ANALYSES, available_analyses

REPORT_FILE = "report.html"
"""Name of the page, and of its template."""
_LENGTH = 160
"""Number of tokens of a passage."""


_COMPARED: tuple[RowName, RowName] = ("spalm", REFERENCE_ROW)
"""Rows whose difference in log-probability determines the colours of the passages."""


@dataclass(frozen=True)
class ColouredToken:
    """A token of a coloured passage."""

    text: str
    colour: str
    """Class in the page's style sheet: how much the memory helped or harmed."""
    title: str
    """Text that is shown when the mouse is over the token."""


def write_report(run: FinishedRun, folder: Path | None = None) -> Path:
    """Makes every analysis of a run, writes its files to `folder`, and writes the page beside them.

    The default folder is RUN/report.
    """
    folder = folder or own_folder(run.directory, "report")
    found: list[Analysis] = []
    names = available_analyses(run)
    with bar("study", len(names)) as progress:
        for name in names:
            progress.say(name)
            found.append(ANALYSES[name](AnalysisRequest(run)))
            found[-1].write(folder)
            progress.advance()
    page = (
        _environment()
        .get_template(REPORT_FILE)
        .render(
            title=run.title,
            version=spalm.__version__,
            results=_results(run),
            unit=run.unit,
            notes=_notes(run),
            analyses=[
                (each, Markup(inline_svg(each.picture(), f"{each.title}. {each.caption}", each.name))) for each in found
            ],
            passages=[_passage(run, rows) for rows in _passages(run)],
            settings=yaml.safe_dump(run.recipe.as_json(), sort_keys=False, allow_unicode=True),
            digests=_digests(run),
        )
    )
    path = folder / REPORT_FILE
    with updating_sums(folder, [REPORT_FILE]):
        write_atomically(path, page)
    return path


def _environment() -> Any:
    """Returns the templates' environment. All text is escaped, because a corpus may hold any; only pictures are not."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes a while to import

    templates = str(resources.files("spalm.study"))
    environment = Environment(
        loader=FileSystemLoader(templates), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = format_cell
    return environment


def _results(run: FinishedRun) -> list[dict[str, Any]]:
    """Returns the rows with the paper's figures, and each row's change against transformer-XL in percent."""
    paper = {(row.model, row.memory_length): row for row in run.recipe.paper}
    reference = {row["memory_length"]: row["test"] for row in run.results if row["model"] == REFERENCE_ROW}
    found = []
    for row in run.results:
        base = reference.get(row["memory_length"])
        against = None if base is None or row["model"] == REFERENCE_ROW else 100 * (row["test"] / base - 1)
        found.append({**row, "against": against, "paper": paper.get((row["model"], row["memory_length"]))})
    return found


def _notes(run: FinishedRun) -> list[str]:
    """Returns the lines below the results."""
    training, network, splits = run.recipe.training, run.recipe.network, run.corpus.facts["splits"]
    more = "The memory holds texts besides the training text: these are not the static figures of the corpus."
    return [
        *([more] if any(row["more_texts_in_memory"] for row in run.results) else []),
        f"{splits['train']['tokens']:,} training tokens in {splits['train']['documents']:,} documents, "
        f"vocabulary of {run.corpus.vocabulary:,}; dev {splits['dev']['tokens']:,}, test {splits['test']['tokens']:,}.",
        f"{network.layers} layers of {network.width}; {training.steps:,} steps of {training.batch_size} x "
        f"{training.segment_length} tokens, seed {training.seed}. Every model made the same number of steps.",
        "M: length of the short-term memory. k: number of neighbours. Ablated: test with the long-term memory taken "
        "away. p: Wilcoxon's test against transformer-xl with the same M.",
        *([f"{keys[0].upper()}{keys[1:]}."] if (keys := key_network_note(run.results)) else []),
    ]


def _passages(run: FinishedRun) -> list[np.ndarray]:
    """Returns passages of test: where SPALM gained most, where it gained the median, and where it lost most."""
    with_memory, without = (run.log_probabilities(row, "test") for row in _COMPARED)
    gain = with_memory - without
    text = run.corpus.split("test")
    places = [
        np.arange(start, min(start + _LENGTH, end))
        for begin, end in zip(text.begins, text.ends)
        for start in range(begin, end, _LENGTH)
    ]
    order = sorted(range(len(places)), key=lambda number: -float(gain[places[number]].sum()))
    return [places[number] for number in dict.fromkeys([order[0], order[len(order) // 2], order[-1]])]


def _passage(run: FinishedRun, rows: np.ndarray) -> dict[str, Any]:
    """Returns a passage as coloured tokens."""
    text, tokeniser = run.corpus.split("test"), run.corpus.tokeniser
    with_memory, without = (run.log_probabilities(row, "test")[rows] for row in _COMPARED)
    gates = np.asarray(run.records("spalm").of("test", "gate")[rows], np.float32).mean(-1)
    retrieved = retrieved_tokens(run.records("spalm"), "test", rows, entries=run.memory.entries())
    tokens = []
    for number, target in enumerate(text.targets(rows).tolist()):
        gain = with_memory[number] - without[number]
        near = "  ".join(visible_token(tokeniser, token) for token in retrieved[number])
        tokens.append(
            ColouredToken(
                token_in_text(tokeniser, target) + tokeniser.separator,
                _colour(gain),
                f"transformer-xl {math.exp(without[number]):.3f}, spalm {math.exp(with_memory[number]):.3f} "
                f"({gain:+.2f} nats), gate {gates[number]:.2f}; retrieved: {near}",
            )
        )
    document, offset = text.document_of(int(rows[0]))
    gained = float((with_memory - without).mean())
    return {"document": document, "offset": offset, "tokens": tokens, "gained": gained}


def _colour(gain: float) -> str:
    """Returns the colour of a gain, in steps of half a nat up to two nats."""
    step = min(4, int(abs(gain) / 0.5))
    return "" if not step else f"{'gain' if gain > 0 else 'loss'}{step}"


def _digests(run: FinishedRun) -> list[tuple[str, str, str]]:
    """Returns the folder, kind and digest of every stage of the run."""
    found = []
    for path in sorted(Path(entry.path) for entry in entries_below(run.directory) if entry.name == MANIFEST):
        name = str(path.parent.relative_to(run.directory))
        if PREVIOUS not in name:
            stage = Artifact(path.parent)
            found.append((name, stage.kind, stage.digest))
    return [*found, ("memory", f"{len(run.memory.entries()):,} entries", run.memory.lineage()[-1])]
