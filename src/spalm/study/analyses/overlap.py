"""Share of dev and test that stands word for word in the memory, and each model's gain there, by match length."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from spalm.corpus import Corpus, TokenSplit
from spalm.memory import Memory, source_of_split
from spalm.memory.exact import LONGEST, NO_DOCUMENTS, Excluded, reversed_contexts
from spalm.runs import HELD_OUT, REFERENCE_ROW, HeldOut, RowName
from spalm.study.analysis import Analysis, AnalysisRequest, Cell, DataTable
from spalm.study.drawing import COLOURS, Axes

_LENGTHS = (0, 1, 2, 4, 8, 16, 32)
"""Shortest match of each bin."""
_SPANS = (8, 16, 32, 64)
"""Least lengths of spans whose share of the text is counted."""
_POSITIONS = 1 << 14
"""Number of positions whose matches are found at a time."""


_TITLE, _LABEL = "What stands word for word in the memory", "longest match"
_CAPTION = (
    "Longest match: number of tokens before a position that stand word for word, in a row, in one document of the "
    f"memory, with something after them ({LONGEST} at most are compared). Lengths: share of positions by their "
    "longest match. Spans: share of the tokens that are in a span of so many tokens or more that stands in the memory."
)


def attached_overlap(directory: Path) -> Analysis:
    """Counts how much of dev and test stands word for word in the memory of a pretrained model."""
    corpus, memory = Corpus(directory / "corpus"), Memory(directory / "memory")
    tables = _share_tables(corpus, memory, _bins_of_splits(corpus, memory))
    rows = tables["lengths"].rows
    caption = f"{_CAPTION} The document itself is left out where the memory holds it. The picture shows the lengths."
    return Analysis(
        "overlap", _TITLE, caption, tables, lambda axes: _draw_shares(axes, rows), data={"longest": LONGEST}
    )


def _share_tables(
    corpus: Corpus, memory: Memory, bins: dict[HeldOut, dict[str, Bool[np.ndarray, "n"]]]
) -> dict[str, DataTable]:
    """Returns the tables of what stands in the memory, given the positions of each bin of match lengths."""
    shares: list[list[Cell]] = [
        [name, *(float(np.mean(bins[split][name])) for split in HELD_OUT)] for name in bins["dev"]
    ]
    spans: list[list[Cell]] = [
        [least, *row] for least, *row in zip(_SPANS, *(_share_in_spans(corpus, memory, split) for split in HELD_OUT))
    ]
    return {
        "lengths": DataTable([_LABEL, *HELD_OUT], shares, "share of positions"),
        "spans": DataTable(["tokens or more", *HELD_OUT], spans, "share of tokens in spans"),
    }


def verbatim_overlap(request: AnalysisRequest) -> Analysis:
    """Counts what stands word for word in the memory, and compares every model with transformer-XL by match length."""
    run = request.run
    bins = _bins_of_splits(run.corpus, run.memory)
    models: list[RowName] = [model for model in run.rows if model != REFERENCE_ROW]
    reference = run.log_probabilities(REFERENCE_ROW, request.split)
    gains = {model: run.log_probabilities(model, request.split) - reference for model in models}
    within: list[list[Cell]] = []
    total: list[list[Cell]] = []
    for name, here in {**bins[request.split], "all": np.ones(len(reference), bool)}.items():
        count = int(here.sum())
        within.append([name, count, *(float(gains[model][here].mean()) if count else None for model in models)])
        total.append([name, *(float(gains[model][here].sum()) / len(here) for model in models)])
    return Analysis(
        "overlap",
        _TITLE,
        f"{_CAPTION} Gains: mean gain in log-probability per token over {REFERENCE_ROW} ({request.where}; nats); the "
        "picture shows them, with each bin's share of the positions below it. Parts: what each bin adds to the mean "
        "gain over all positions.",
        {
            **_share_tables(run.corpus, run.memory, bins),
            "gains": DataTable([_LABEL, "positions", *models], within, f"mean gain over {REFERENCE_ROW}"),
            "parts": DataTable([_LABEL, *models], total, "parts of the whole gain"),
        },
        lambda axes: _draw(axes, within, models),
        data={"split": request.split, "longest": LONGEST},
    )


def match_lengths(corpus: Corpus, memory: Memory, split: HeldOut) -> Int[np.ndarray, "positions"]:
    """Returns the length of the longest match of every position of a split, outside of its own document."""
    text, first_id = corpus.split(split), _first_id(corpus, memory, split)
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(text), _POSITIONS):
        positions = np.arange(start, min(len(text), start + _POSITIONS))
        excluded = None if first_id is None else _own_documents(text, positions, first_id)
        found.append(memory.exact.current().find(reversed_contexts(text, positions), excluded).lengths[:, 0])
    return np.concatenate(found)


def _first_id(corpus: Corpus, memory: Memory, split: HeldOut) -> int | None:
    """Returns the id of a split's first entry if the split itself was remembered, None otherwise."""
    return memory.first_id(source_of_split(corpus, split))


def _own_documents(text: TokenSplit, positions: Int[np.ndarray, "n"], first_id: int) -> Excluded:
    """Returns the entries of each position's own document."""
    document = text.documents_of(positions)
    return Excluded(first_id + text.begins[document], first_id + text.ends[document].astype(np.int64))


def _bins_of_splits(corpus: Corpus, memory: Memory) -> dict[HeldOut, dict[str, Bool[np.ndarray, "n"]]]:
    """Returns the positions of each bin of match lengths, for dev and test."""
    return {split: _bins(match_lengths(corpus, memory, split)) for split in HELD_OUT}


def _bins(lengths: Int[np.ndarray, "n"]) -> dict[str, Bool[np.ndarray, "n"]]:
    """Returns the positions of each bin of match lengths, by its name."""
    found = {}
    for low, high in zip(_LENGTHS, [*_LENGTHS[1:], None]):
        name = f"{low} or more" if high is None else str(low) if high == low + 1 else f"{low} to {high - 1}"
        found[name] = (lengths >= low) & (lengths < (np.inf if high is None else high))
    return found


def _share_in_spans(corpus: Corpus, memory: Memory, split: HeldOut) -> list[float]:
    """Returns the share of a split's tokens that are in a span of each least length that stands in the memory."""
    text, first_id = corpus.split(split), _first_id(corpus, memory, split)
    longest = np.zeros(len(text), np.int64)
    for begin, end in zip(text.begins.tolist(), text.ends.tolist()):
        own = NO_DOCUMENTS if first_id is None else np.array([first_id + begin])
        for span in memory.exact.current().trace(text.tokens[begin:end], min(_SPANS), own):
            inside = longest[begin + span.start : begin + span.end]
            np.maximum(inside, len(span), out=inside)
    return [float(np.mean(longest >= least)) for least in _SPANS]


def _draw(axes: Axes, rows: list[list[Any]], models: list[RowName]) -> None:
    *bins, (_, positions, *_) = [row for row in rows if row[1]]
    for number, model in enumerate(models):
        axes.plot([row[2 + number] for row in bins], "o-", ms=3, lw=1.4, label=model, color=COLOURS[number % 6])
    axes.axhline(0, color=COLOURS[-1], lw=0.8)
    axes.set_xticks(range(len(bins)), [f"{row[0]}\n{row[1] / positions:.1%}" for row in bins])
    axes.set_xlabel(f"{_LABEL} in tokens, and share of the positions")
    axes.set_ylabel("gain in nats/token")
    axes.legend(fontsize="small", ncols=2)


def _draw_shares(axes: Axes, rows: list[list[Any]]) -> None:
    for number, split in enumerate(HELD_OUT):
        shares = [row[1 + number] for row in rows]
        axes.plot(range(len(rows)), shares, "o-", ms=3, lw=1.4, label=split, color=COLOURS[number])
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
    axes.set_xlabel(f"{_LABEL} in tokens")
    axes.set_ylabel("share of the positions")
    axes.legend(fontsize="small")
