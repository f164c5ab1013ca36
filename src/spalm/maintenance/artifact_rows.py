"""Rows of finished artifacts, which are erased in place. The digest by which others know them stays as it was."""

import shutil
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Int

from spalm.artifact import Artifact, erasing
from spalm.corpus import SPLITS, Corpus, Split
from spalm.corpus.tokeniser import END_OF_LINE, UNKNOWN
from spalm.files import replacing, write_atomically
from spalm.memory import MISSING

_SCORES = ("log_probabilities", "without_memory")
"""Arrays whose erased rows get the mean of the others, so that figures made from them stay near what they were."""
_AT_ONCE = 1 << 18
"""Rows that are looked at together."""
_GONE = "(forgotten)"
"""Name of a document that was erased, followed by its number."""
Change = Callable[[np.ndarray], None]
"""Changes an array in place."""


def erase_documents(corpus: Corpus, masks: Mapping[Split, Bool[np.ndarray, "documents"]]) -> int:
    """Erases the text and the names of documents of a corpus; returns how many were still there."""
    left = {split: _still_there(corpus, split, mask) for split, mask in masks.items()}
    if not any(left.values()):
        return 0
    with erasing(corpus.directory):
        for split, mask in masks.items():
            text = corpus.split(split)
            rows = np.repeat(mask, text.ends - text.begins)
            _rewrite(corpus, f"{split}.tokens", _filling(rows, corpus.tokeniser.start))
        _erase_unused_words(corpus)
        for split, mask in masks.items():  # last: they say what is still to be erased
            text = corpus.split(split)
            names = [f"{_GONE} {number}" if mask[number] else name for number, name in enumerate(text.names)]
            write_atomically(corpus.directory / f"{split}.names", "".join(f"{name}\n" for name in names))
    return sum(left.values())


def _still_there(corpus: Corpus, split: Split, mask: Bool[np.ndarray, "documents"]) -> int:
    """Returns how many of some documents have not been erased yet."""
    names = corpus.split(split).names
    return sum(names[number] != f"{_GONE} {number}" for number in np.flatnonzero(mask).tolist())


def _erase_unused_words(corpus: Corpus) -> None:
    """Erases words of the vocabulary that stand in no text any more: they may have stood in erased ones only."""
    content = corpus.tokeniser.to_json()
    if content["kind"] != "words":
        return
    used = {UNKNOWN, END_OF_LINE}
    for split in SPLITS:
        tokens = np.fromfile(corpus.directory / f"{split}.tokens", corpus.split(split).tokens.dtype)
        used |= {content["words"][token] for token in np.unique(tokens).tolist()}
    words = [word if word in used else f"{_GONE}-{number}" for number, word in enumerate(content["words"])]
    corpus.write_tokeniser({**content, "words": words})


def erase_rows(artifact: Artifact, rows: Mapping[Split, Bool[np.ndarray, "positions"]]) -> int:
    """Erases rows of the arrays of each split; returns the number of arrays in which anything was left to erase."""
    changes: dict[str, Change] = {}
    for name, array in _arrays(artifact).items():
        split, _, kind = name.partition(".")
        mask = rows.get(split)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if mask is not None and mask.any() and len(array) == len(mask):
            value = _nothing(kind, array, mask)
            if not (np.asarray(array[mask]) == value).all():
                changes[name] = _filling(mask, value)
    return _apply(artifact, changes)


def erase_ids(artifact: Artifact, ids: Int[np.ndarray, "ids"]) -> int:
    """Erases entries from the neighbours that an artifact holds; returns the number of arrays that are changed."""
    changes: dict[str, Change] = {}
    for name, array in _arrays(artifact).items():
        split, _, kind = name.partition(".")
        if kind in ("ids", "neighbours") and len(array):
            parts = [np.isin(array[start : start + _AT_ONCE], ids) for start in range(0, len(array), _AT_ONCE)]
            found = np.concatenate(parts)
            if found.any():
                changes |= {name: _filling(found, MISSING), f"{split}.distances": _filling(found, np.inf)}
    return _apply(artifact, changes)


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    """Returns the arrays of an artifact by name."""
    return {name: artifact.array(name) for name, entry in artifact.manifest["files"].items() if "shape" in entry}


def _nothing(kind: str, array: np.ndarray, rows: Bool[np.ndarray, "positions"]) -> float:
    """Returns the value that stands for nothing in an array."""
    if array.dtype.kind == "i":
        return MISSING
    if kind == "distances":
        return np.inf
    if kind in _SCORES and not rows.all():
        return float(array.dtype.type(np.asarray(array)[~rows].mean(dtype=np.float64)))
    return 0.0


def _filling(where: Bool[np.ndarray, "..."], value: float) -> Change:
    """Returns a change that sets some of an array's values."""

    def change(array: np.ndarray) -> None:
        array[where] = value

    return change


def _apply(artifact: Artifact, changes: Mapping[str, Change]) -> int:
    """Changes arrays of an artifact; returns their number."""
    if changes:
        with erasing(artifact.directory):
            for name, change in changes.items():
                _rewrite(artifact, name, change)
    return len(changes)


def _rewrite(artifact: Artifact, name: str, change: Change) -> None:
    """Replaces the file of an array by a changed copy."""
    path, array = artifact.directory / name, artifact.array(name)
    with replacing(path) as copy:
        shutil.copyfile(path, copy)
        mapped = np.memmap(copy, array.dtype, "r+", shape=array.shape)
        change(mapped)
        mapped.flush()
