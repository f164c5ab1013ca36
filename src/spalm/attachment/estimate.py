"""What attaching a memory takes on this machine: time, disk and RAM, told before it begins."""

import time
from pathlib import Path

import torch

from spalm.artifact import MANIFEST
from spalm.attachment.base import PretrainedBase
from spalm.attachment.settings import AttachSettings
from spalm.console import say
from spalm.corpus import Corpus
from spalm.memory import Memory, is_memory
from spalm.runs import HELD_OUT

_WRITING = 3
"""Number of tokens that are read in the time in which the model writes one, beside others."""
QUESTION_SHARE = 5
"""Number of training positions for each position that is learned from as part of a question."""
_FLOP_PER_POSITION, _FLOP_PER_NEIGHBOUR = 1.5e8, 8e5
"""Work for a position that is learned from or measured, in the time of so many operations of a matrix product:
matching it, and searching for each of its neighbours and learning from it."""
_TIMES_PREDICTED = 2.5
"""Number of times that the output layer is computed for such a position, on average."""
_EXACT, _INDEX, _TOKEN = 52, 30, 4
"""Bytes on disk for each entry: sorted contexts, the index beside its codes, the token."""
_RAM_OF_POSITION = 3000
"""Bytes of RAM for each position that is learned from or measured, without its neighbours and its hidden state."""
_RAM_OF_NEIGHBOUR = 150
"""Bytes of RAM for each of its neighbours: tokens, distances, and what the mixture sees of them."""
_RAM = 700e6
"""Bytes of RAM that libraries and buffers take."""
_MATRIX = 1024
"""Rows of the matrices whose product is timed."""


def tokens_to_read(settings: AttachSettings, corpus: Corpus) -> int:
    """Returns about how many tokens the model reads: for keys, to learn the combiner from, and to measure it on."""
    train, held_out = _sizes(settings, corpus)
    questions = settings.positions // QUESTION_SHARE + _WRITING * settings.own_text
    if settings.memory == "exact":
        return min(train, settings.positions) + questions + sum(held_out)
    return _keys(settings, corpus) + questions + (0 if _all_have_keys(settings, corpus) else sum(held_out))


def announce(
    settings: AttachSettings, base: PretrainedBase, corpus: Corpus, *, directory: Path, speed: float | None
) -> None:
    """Says what attaching takes or, if it was begun before, what is left of it; nothing if it is done.

    `speed` is the number of tokens that the model reads in a second, if it was measured.
    """
    if (directory / "combiner" / MANIFEST).exists():
        return
    memory = Memory(directory / "memory") if is_memory(directory / "memory") else None
    total, done = tokens_to_read(settings, corpus), 0 if memory is None else memory.written_keys()
    left, seconds = max(0, total - done), _seconds_to_fit(settings, base, corpus)
    reading = "" if speed is None else f" ({duration(left / speed)} at {speed:,.0f} tokens/s)"
    all_seconds = seconds + (0 if speed is None else left / speed)
    disk, ram = _disk(settings, base, corpus), _ram(settings, base, corpus)
    say(
        f"the model, by {base.keys_by}, reads {left:,} {'more ' if done else ''}tokens{reading}; searching and fitting "
        f"take about {duration(seconds)}: {duration(all_seconds)} in all, up to {disk / 1e6:,.0f} MB of disk and "
        f"{ram / 1e9:.1f} GB of RAM"
    )


def duration(seconds: float) -> str:
    """Returns a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sizes(settings: AttachSettings, corpus: Corpus) -> tuple[int, list[int]]:
    """Returns the tokens of train, and those of dev and test that are used."""
    return len(corpus.split("train")), [min(len(corpus.split(split)), settings.held_out) for split in HELD_OUT]


def _all_have_keys(settings: AttachSettings, corpus: Corpus) -> bool:
    """Returns whether every training position gets a key; then those of dev and test get one too."""
    return settings.memory != "exact" and (settings.keys is None or settings.keys >= len(corpus.split("train")))


def _keys(settings: AttachSettings, corpus: Corpus) -> int:
    """Returns about how many entries get keys."""
    if settings.memory == "exact":
        return 0
    train = len(corpus.split("train"))
    if not _all_have_keys(settings, corpus):
        return settings.keys or train
    of_library = max(0, (settings.keys or 0) - train) if settings.library else 0
    return train + of_library + sum(len(corpus.split(split)) for split in HELD_OUT)


def _positions(settings: AttachSettings, corpus: Corpus) -> int:
    """Returns how many positions are learned from and measured."""
    train, held_out = _sizes(settings, corpus)
    further = settings.positions // QUESTION_SHARE + settings.own_text
    return min(train, settings.positions) + further + sum(held_out)


def _seconds_to_fit(settings: AttachSettings, base: PretrainedBase, corpus: Corpus) -> float:
    """Returns about how long searching, predicting and learning take."""
    neighbours = 0 if settings.memory == "exact" else settings.neighbours
    output_layer = 2.0 * base.model.width * base.model.vocabulary * _TIMES_PREDICTED
    each = _FLOP_PER_POSITION + _FLOP_PER_NEIGHBOUR * neighbours + output_layer
    return _positions(settings, corpus) * each / _flop_per_second()


def _flop_per_second() -> float:
    """Returns the speed of a matrix product in float32."""
    matrix = torch.ones(_MATRIX, _MATRIX)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - begun)
    return 2 * _MATRIX**3 / sorted(seconds[1:])[1]


def _disk(settings: AttachSettings, base: PretrainedBase, corpus: Corpus) -> float:
    """Returns the bytes that memory and index take, without a library's."""
    entries = sum(len(corpus.split(split)) for split in ("train", *HELD_OUT))
    width = base.model.width
    return entries * (_EXACT + _TOKEN) + _keys(settings, corpus) * (2 * width + width + _INDEX)


def _ram(settings: AttachSettings, base: PretrainedBase, corpus: Corpus) -> float:
    """Returns the bytes of RAM that are used at the most."""
    neighbours = 0 if settings.memory == "exact" else settings.neighbours
    of_position = _RAM_OF_POSITION + 4 * base.model.width + _RAM_OF_NEIGHBOUR * neighbours
    examples = _positions(settings, corpus) + min(len(corpus.split("train")), settings.positions)  # these twice
    index = _keys(settings, corpus) * (base.model.width + _INDEX)
    return _RAM + base.folder.size + examples * of_position + index
