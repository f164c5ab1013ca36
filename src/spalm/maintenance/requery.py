"""Asking again: whether lists of documents, tracing or nearest search still find documents that were removed."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from spalm.artifact import MANIFEST
from spalm.corpus import SPLITS
from spalm.errors import InputError
from spalm.generation import open_traceable
from spalm.generation.trace import CORPUS_FOLDER
from spalm.maintenance.place import Place
from spalm.memory import Entries, Memory
from spalm.neighbours import Searcher, open_searcher
from spalm.neighbours.index.build import DESCRIPTION
from spalm.neighbours.index.kinds import FlatIndex

_NEAREST = 8
"""Number of neighbours that are asked for."""


@dataclass(frozen=True)
class Questions:
    """What is known of documents before they are removed, by which they could be found."""

    names: list[str]
    pieces: list[Int[np.ndarray, "tokens"]]
    """Pieces of their text that stand nowhere else in the memory."""
    ids: Int[np.ndarray, "entries"]
    """Some of their entries that have keys."""
    keys: Float[np.ndarray, "entries width"]
    """Keys of these entries."""

    @classmethod
    def of(
        cls,
        entries: Entries,
        names: list[str],
        pieces: list[Int[np.ndarray, "tokens"]],
        *,
        ids: Int[np.ndarray, "some"],
    ) -> "Questions":
        """Returns the questions about documents of which these are pieces and the ids of entries."""
        with_keys = entries.with_keys
        rows = with_keys.rows(ids)
        return cls(names, pieces, ids[rows >= 0], np.array(with_keys.take(rows[rows >= 0]), np.float32))


@dataclass(frozen=True)
class Asked:
    """Number of questions, and number of those that found something."""

    asked: int
    found: int


def ask_again(place: Place, questions: Questions) -> dict[str, Asked]:
    """Asks by `documents`, `trace` and `nearest`. The memory is opened anew, as users open it."""
    memory = Memory(place.memory.directory)
    return {
        "documents": _listed(place, memory, questions.names),
        "trace": _traced(place, memory, questions.pieces),
        "nearest": _nearest(place, memory, questions),
    }


def _listed(place: Place, memory: Memory, names: list[str]) -> Asked:
    """Returns how many names are in the list of documents of a memory or of a corpus."""
    listed = {name for each in (memory, *place.other_memories()) for name in each.entries().live_documents.names}
    for corpus in place.corpora():
        listed |= {name for split in SPLITS for name in corpus.split(split).names}
    return Asked(len(names), len({*names} & listed))


def _traced(place: Place, memory: Memory, pieces: list[Int[np.ndarray, "tokens"]]) -> Asked:
    """Returns how many pieces of text are found in the memory word for word."""
    if not (place.root / CORPUS_FOLDER / MANIFEST).is_file():  # there is no tokeniser, so text cannot be traced
        view = memory.exact.current()
        return Asked(len(pieces), sum(bool(view.trace(piece, len(piece))) for piece in pieces))
    opened, asked, found = open_traceable(place.root), 0, 0
    for piece in pieces:
        text = opened.tokeniser.decode(piece.tolist())
        if np.array_equal(opened.tokeniser.encode([text.encode()])[0], piece):  # else the text would be cut elsewhere
            asked, found = asked + 1, found + bool(opened.trace(text, least=len(piece)))
    return Asked(asked, found)


def _nearest(place: Place, memory: Memory, questions: Questions) -> Asked:
    """Returns how many keys find an entry of the documents, by comparing every entry and by every index there is."""
    if not len(questions.keys):
        return Asked(0, 0)
    searchers = [Searcher(memory, FlatIndex(), 0)]
    for folder in place.stages(DESCRIPTION):
        with suppress(InputError):  # nobody can search an index that is refused
            searchers.append(open_searcher(memory, folder)[0])
    results = [searcher.search(questions.keys, _NEAREST)[0] for searcher in searchers]
    found = sum(int(np.isin(ids, questions.ids).any(1).sum()) for ids in results)
    return Asked(len(searchers) * len(questions.keys), found)
