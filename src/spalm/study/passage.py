"""A passage, token by token: what came, what the models thought of it, the gate, and the tokens that were retrieved."""

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spalm.corpus import Corpus, Split
from spalm.semiparametric import Records, Retriever


def print_passage(
    corpus: Corpus,
    split: Split,
    rows: np.ndarray,
    spalm: Records,
    reference: Records,
    retriever: Retriever,
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
    found = retriever(rows)
    for number, target in enumerate(text.targets(rows).tolist()):
        retrieved = Text("  ").join(
            Text(shown(decode([token])), style="bold green" if token == target else "dim")
            for token in found.tokens[number][found.there[number]].tolist()
        )
        values = [f"{each[number]:.3f}" for each in probabilities]
        gate = f"{spalm.of(split, 'gate')[rows[number]]:.2f}"
        table.add_row(Text(shown(decode([target])), style="bold"), *values, gate, retrieved)
    console.print(table)


def shown(token: str) -> str:
    """A token with its blanks and line ends visible."""
    return token.replace("\n", "↵").replace("\t", "→").replace(" ", "·") or "∅"


def where_memory_helped(spalm: Records, reference: Records, split: Split, length: int) -> np.ndarray:
    """The positions of the passage in which SPALM gained most over transformer-XL."""
    gain = np.asarray(spalm.log_probabilities(split), np.float64) - reference.log_probabilities(split)
    sums = np.convolve(gain, np.ones(min(length, len(gain))), mode="valid")
    first = int(sums.argmax())
    return np.arange(first, first + min(length, len(gain)))
