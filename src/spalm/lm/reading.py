"""Reading a stream of tokens at test time: hidden states of every position, many lanes at once, as if it were one.

With a short-term memory, a segment's hidden states depend on nothing further back than `layers` times its reach. So a
lane that starts that many segments early, on the same grid of segments, arrives with exactly the state of the one
stream that read everything: batched and unbatched evaluation are the same numbers. Without a memory, windows overlap
instead: each of them reads `segment` tokens and keeps the hidden states of its last `stride`. Documents may be read
each from its own beginning, so that nothing of one is in the hidden states of another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.corpus import TokenSplit, TokenStream
from spalm.errors import InputError
from spalm.lm.interface import LanguageModel


@dataclass(frozen=True)
class Reading:
    """How a stream is read."""

    segment: int
    """Tokens read at a time: N."""
    memory: int
    """Length of the short-term memory: M."""
    stride: int
    """Without a memory: new tokens in each window; the rest of the window is left context. With one: the segment."""
    lanes: int
    """Places of the stream that are read side by side."""
    warm_up: int
    """Segments to read before the first that is wanted, so that the memory is what it would be in one stream."""
    by_document: bool = False
    """Without a memory: windows begin anew with each document, after a start symbol."""

    @classmethod
    def of(cls, layers: int, segment: int, memory: int, lanes: int, stride: int | None = None) -> "Reading":
        warm_up = layers * -(-memory // segment)
        return cls(segment, memory, segment if memory or stride is None else stride, lanes, warm_up)


Hidden = tuple[Int[np.ndarray, "n"], Float[Tensor, "n width"]]


@torch.inference_mode()
def hidden_states(model: LanguageModel, stream: TokenStream, reading: Reading, wanted: range) -> Iterator[Hidden]:
    """Yields (positions, hidden states) until every position of a range has come, in groups of any order.

    The range must begin on the grid of strides, so that a position's result does not depend on where reading began.
    """
    start, stop = wanted.start, wanted.stop
    assert reading.by_document or start % reading.stride == 0
    run = _by_document if reading.by_document else _carried if reading.memory else _windows
    for positions, hidden in run(model, stream, reading, start, stop):
        inside = (positions >= start) & (positions < stop)
        if inside.all():
            yield positions.reshape(-1), hidden.flatten(0, 1)
        elif inside.any():
            yield positions[inside], hidden[torch.from_numpy(inside).to(hidden.device)]


def _inputs(stream: TokenStream, positions: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(stream.inputs(np.minimum(positions, len(stream) - 1))).to(device)


def _windows(
    model: LanguageModel, stream: TokenStream, reading: Reading, start: int, stop: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Overlapping windows without memory. Those at the very beginning, which have less context, are read one by one."""
    context = reading.segment - reading.stride
    ends = np.arange(start, stop, reading.stride) + reading.stride
    early, full = ends[ends < reading.segment], ends[ends >= reading.segment]
    groups = [ends[None] for ends in early] + [full[i : i + reading.lanes] for i in range(0, len(full), reading.lanes)]
    for group in groups:
        length = min(reading.segment, int(group[0]))
        positions = group[:, None] - length + np.arange(length)
        hidden = model.hidden(_inputs(stream, positions, model.device), None)
        kept = min(context, length - reading.stride)
        yield positions[:, kept:], hidden[:, kept:]


def _by_document(
    model: LanguageModel, stream: TokenStream, reading: Reading, start: int, stop: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Overlapping windows within documents. Shorter ones are filled up on the right, which nobody sees."""
    windows = [
        window
        for document in range(*stream.documents_of(np.array([start, stop - 1])) + np.array([0, 1]))
        for window in _windows_of(int(stream.begins[document]), int(stream.ends[document]), reading)
        if window[2] > start and window[1] < stop
    ]
    for group in (windows[i : i + reading.lanes] for i in range(0, len(windows), reading.lanes)):
        begins = np.array([begin for begin, _, _ in group])[:, None]
        positions = begins + np.arange(max(last - begin for begin, _, last in group))
        inputs = _inputs(stream, positions, model.device)
        inputs[np.isin(begins[:, 0], stream.begins), 0] = stream.start
        hidden = model.hidden(inputs, None)
        for lane, (begin, first, last) in enumerate(group):
            new = slice(first - begin, last - begin)
            yield positions[lane : lane + 1, new], hidden[lane : lane + 1, new]


def _windows_of(begin: int, end: int, reading: Reading) -> Iterator[tuple[int, int, int]]:
    """(first position read, first that is new, end): the first window is new as a whole, the others at their end."""
    new = begin
    last = min(end, begin + reading.segment)
    while new < end:
        yield max(begin, last - reading.segment), new, last
        new, last = last, min(end, last + reading.stride)


def _carried(
    model: LanguageModel, stream: TokenStream, reading: Reading, start: int, stop: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Lanes with a carried memory. A lane that begins at the start of the text has an empty one, so it reads alone."""
    first, last = start // reading.segment, -(-stop // reading.segment)
    count = last - first
    # A lane shorter than its warm-up would be read mostly for nothing.
    lanes = max(1, min(reading.lanes, count // max(1, reading.warm_up)))
    length = -(-count // lanes)
    starts = list(range(first, last, length))
    alone = [begin for begin in starts if begin < reading.warm_up]
    together = [begin for begin in starts if begin >= reading.warm_up]
    for group in [[begin] for begin in alone] + ([together] if together else []):
        early = min(reading.warm_up, group[0])
        state = model.start(reading.memory, reading.segment)
        begins = np.array(group)[:, None]
        for segment in range(-early, length):
            positions = (begins + segment) * reading.segment + np.arange(reading.segment)
            hidden = model.hidden(_inputs(stream, positions, model.device), state)
            if segment >= 0:
                yield positions, hidden


def log_probabilities(
    model: LanguageModel, split: TokenSplit, reading: Reading, positions: range
) -> Float[np.ndarray, "positions"]:
    """Returns log p(x_{t+1} | x_<=t) of every position of a range, in order."""
    found = np.full(len(positions), np.nan, np.float32)
    for group, hidden in hidden_states(model, split, reading, positions):
        targets = torch.from_numpy(split.targets(group)).to(model.device)
        with torch.inference_mode():
            found[group - positions.start] = model.target_log_probabilities(hidden, targets).cpu().numpy()
    refuse_divergence(found)
    return found


def refuse_divergence(log_probabilities: Float[np.ndarray, "positions"]) -> None:
    """A model that has diverged is told so, instead of being reported with figures that are no numbers."""
    if not np.isfinite(log_probabilities).all():
        raise InputError(
            "the model's log-probabilities are no longer numbers: it has diverged; train it again with a lower "
            "training.optimiser.learning_rate"
        )
