"""Cutting a document by position: its beginning is for training, what follows for dev, and its end for test."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from spalm.corpus.sources.text_source import SPLITS, Document, Split

_LONGEST_SEARCH = 4096
"""Number of bytes within which a line must end to be cut there; otherwise the cut is after the next space."""


@dataclass(frozen=True)
class _Slice:
    """Bytes [start, stop) of a text in pieces, which is read anew in each iteration."""

    pieces: Iterable[bytes]
    start: int
    stop: int

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        for piece in self.pieces:
            inside = piece[max(0, self.start - position) : max(0, self.stop - position)]
            if inside:
                yield inside
            position += len(piece)
            if position >= self.stop:
                return


def cut_document(document: Document, shares: dict[Split, float]) -> dict[Split, Document]:
    """Returns the parts of a document, one for each split, together the same bytes; empty if it is too small.

    `shares` holds the shares of dev and test. A part ends with a line, or after a space in a very long line.
    """
    size = sum(len(piece) for piece in document.pieces)
    targets = [size * (1 - shares["dev"] - shares["test"]), size * (1 - shares["test"])]
    bounds = [0, *_cuts(document.pieces, [round(target) for target in targets]), size]
    if any(start >= stop for start, stop in pairwise(bounds)):
        return {}
    return {
        split: Document(f"{document.name} ({split})", _Slice(document.pieces, start, stop))
        for split, (start, stop) in zip(SPLITS, pairwise(bounds))
    }


def _cuts(pieces: Iterable[bytes], targets: list[int]) -> list[int]:
    """Returns, for each of the rising positions `targets`, the first end of a line at or after it."""
    cuts: list[int] = []
    position = 0
    for piece in pieces:
        while len(cuts) < len(targets) and targets[len(cuts)] <= position + len(piece):
            offset = max(0, targets[len(cuts)] - position - 1)
            end = piece.find(b"\n", offset) + 1 or len(piece)
            if end - offset > _LONGEST_SEARCH:
                end = piece.find(b" ", offset) + 1 or end
            cuts.append(position + end)
        position += len(piece)
    return cuts
