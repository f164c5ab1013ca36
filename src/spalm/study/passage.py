"""A passage, token by token: what came, what the models thought of it, the gate, and the tokens that were retrieved."""

import unicodedata

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spalm.corpus import Corpus, Split
from spalm.memory import Entries
from spalm.semiparametric import FinishedRun, Records


def print_passage(
    corpus: Corpus,
    split: Split,
    rows: np.ndarray,
    spalm: Records,
    reference: Records,
    entries: Entries,
    console: Console,
) -> None:
    """One line a token. Retrieved tokens that are the one that came are marked."""
    text, decode = corpus.split(split), corpus.tokeniser.decode
    document, offset = text.document_of(int(rows[0]))
    table = Table(title=f"{document}, from token {offset}", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in ("token", "transformer-xl", "spalm", "gate"):
        table.add_column(name, justify="left" if name == "token" else "right")
    table.add_column("retrieved, nearest first", no_wrap=True)
    probabilities = [np.exp(records.log_probabilities(split)[rows]) for records in (reference, spalm)]
    gates = spalm.of(split, "gate")[rows].mean(-1, dtype=np.float32)
    found = retrieved_tokens(spalm, split, rows, entries)
    for number, target in enumerate(text.targets(rows).tolist()):
        retrieved = Text("  ").join(
            Text(shown(decode([token])), style="bold green" if token == target else "dim") for token in found[number]
        )
        values = [f"{each[number]:.3f}" for each in probabilities]
        table.add_row(Text(shown(decode([target])), style="bold"), *values, f"{gates[number]:.2f}", retrieved)
    console.print(table)


def retrieved_tokens(spalm: Records, split: Split, rows: np.ndarray, entries: Entries) -> list[list[int]]:
    """The tokens that SPALM attended to at some positions, nearest first, as far as their documents are still held."""
    ids = np.asarray(spalm.of(split, "neighbours")[rows])
    places = entries.rows(ids)
    tokens = entries.take_tokens(places.clip(0))
    return [row[there].tolist() for row, there in zip(tokens, places >= 0)]


def shown(token: str) -> str:
    """A token with its blanks, line ends and other signs that leave no trace made visible."""
    return "".join(_SIGNS.get(letter) or _visible(letter) for letter in token) or "∅"


_SIGNS = {"\n": "↵", "\t": "→", " ": "·"}


def _visible(letter: str) -> str:
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    return {"C": "\ufffd", "Z": "␣"}.get(unicodedata.category(letter)[0], letter)


def where_memory_helped(spalm: Records, reference: Records, split: Split, length: int) -> np.ndarray:
    """The positions of the passage in which SPALM gained most over transformer-XL."""
    gain = np.asarray(spalm.log_probabilities(split), np.float64) - reference.log_probabilities(split)
    sums = np.convolve(gain, np.ones(min(length, len(gain))), mode="valid")
    first = int(sums.argmax())
    return np.arange(first, first + min(length, len(gain)))


def passage_of(run: FinishedRun, split: Split, length: int, first: int | None = None) -> np.ndarray:
    """Positions from `first` on; default: where the long-term memory helped most."""
    if first is None:
        return where_memory_helped(run.records("spalm"), run.records("transformer-xl"), split, length)
    count = len(run.corpus.split(split))
    return np.arange(min(first, count - 1), min(first + length, count))
