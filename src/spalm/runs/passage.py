"""A passage, token by token: the actual token, its probabilities, the gate, and the tokens that were retrieved."""

from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spalm.corpus import Corpus, Split, TokenSplit, visible_token
from spalm.memory import Entries
from spalm.runs.finished_run import FinishedRun
from spalm.runs.records import Records
from spalm.runs.rows import REFERENCE_ROW


@dataclass(frozen=True)
class SplitPassage:
    """Consecutive positions of a split."""

    corpus: Corpus
    split: Split
    rows: np.ndarray

    @property
    def text(self) -> TokenSplit:
        """The split that the passage is part of."""
        return self.corpus.split(self.split)


def print_passage(
    passage: SplitPassage, spalm: Records, reference: Records, *, entries: Entries, console: Console
) -> None:
    """Prints one line for each token, from the records of SPALM and of transformer-XL.

    Retrieved tokens that equal the actual token are marked.
    """
    text, tokeniser, split, rows = passage.text, passage.corpus.tokeniser, passage.split, passage.rows
    document, offset = text.document_of(int(rows[0]))
    table = Table(
        title=Text(f"{document}, from token {offset}"), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    for name in ("token", REFERENCE_ROW, "spalm", "gate"):
        table.add_column(name, justify="left" if name == "token" else "right")
    table.add_column("retrieved, nearest first", no_wrap=True)
    probabilities = [np.exp(records.log_probabilities(split)[rows]) for records in (reference, spalm)]
    gates = spalm.of(split, "gate")[rows].mean(-1, dtype=np.float32)
    found = retrieved_tokens(spalm, split, rows, entries=entries)
    for number, target in enumerate(text.targets(rows).tolist()):
        retrieved = Text("  ").join(
            Text(visible_token(tokeniser, token), style="bold green" if token == target else "dim")
            for token in found[number]
        )
        values = [f"{each[number]:.3f}" for each in probabilities]
        table.add_row(Text(visible_token(tokeniser, target), style="bold"), *values, f"{gates[number]:.2f}", retrieved)
    console.print(table)


def retrieved_tokens(spalm: Records, split: Split, rows: np.ndarray, *, entries: Entries) -> list[list[int]]:
    """Returns the tokens that SPALM attended to at some positions, nearest first, without forgotten documents."""
    tokens = entries.tokens_of(np.asarray(spalm.of(split, "neighbours")[rows]))
    return [row[row >= 0].tolist() for row in tokens]


def where_memory_helped(text: TokenSplit, spalm: Records, reference: Records, *, length: int) -> np.ndarray:
    """Returns the positions of the passage, within a document, in which SPALM gained most over transformer-XL."""
    gain = np.asarray(spalm.log_probabilities(text.split), np.float64) - reference.log_probabilities(text.split)
    sums = np.concatenate([[0.0], np.cumsum(gain)])
    starts = np.arange(len(gain))
    stops = np.minimum(starts + length, text.ends[text.documents_of(starts)])
    first = int((sums[stops] - sums[starts]).argmax())
    return np.arange(first, stops[first])


def passage_of(run: FinishedRun, split: Split, length: int, *, first: int | None = None) -> np.ndarray:
    """Returns positions of one document from `first` on; default: where the long-term memory helped most."""
    text = run.corpus.split(split)
    if first is None:
        return where_memory_helped(text, run.records("spalm"), run.records(REFERENCE_ROW), length=length)
    return np.arange(first, min(first + length, int(text.ends[text.documents_of(np.array(first))])))
