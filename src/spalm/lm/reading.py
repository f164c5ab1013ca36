"""Reads a stream of tokens at test time: hidden states of every position, in many lanes, as if it were one lane.

With a short-term memory, a segment's hidden states depend on nothing further back than `layers` times its reach. So a
lane that starts that many segments early, on the same grid of segments, arrives with exactly the state of a single
lane that has read everything: batched and unbatched evaluation give the same numbers. Without a memory, windows overlap
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
from spalm.lm.lane_threads import with_lane_threads


@dataclass(frozen=True)
class Reading:
    """A way of reading a stream: in segments with a short-term memory, or in windows."""

    segment: int
    """Number of tokens read at a time: N."""
    memory: int
    """Length of the short-term memory: M."""
    stride: int
    """New tokens in each window, the rest of which is left context; with a memory, the segment."""
    lanes: int
    """Number of places of the stream that are read side by side."""
    warm_up: int
    """Segments that a lane reads before its first, so that its memory is what it would be in a single lane."""
    by_document: bool = False
    """Whether windows begin anew with each document, after a start symbol; only without a memory."""

    @classmethod
    def of(cls, layers: int, *, segment: int, memory: int, lanes: int, stride: int | None = None) -> "Reading":
        """Returns how a network of `layers` layers reads; without a stride, windows do not overlap."""
        warm_up = layers * -(-memory // segment)
        return cls(segment, memory, segment if memory or stride is None else stride, lanes, warm_up)


PositionsAndHidden = tuple[Int[np.ndarray, "n"], Float[Tensor, "n width"]]
"""Positions of a stream and their hidden states."""
_Windows = Iterator[tuple[Int[np.ndarray, "batch time"], Float[Tensor, "batch time width"]]]
"""Positions of windows or segments, and their hidden states."""


@torch.inference_mode()
def hidden_states(
    model: LanguageModel, stream: TokenStream, reading: Reading, *, wanted: range
) -> Iterator[PositionsAndHidden]:
    """Yields groups of positions and their hidden states, in any order, for every position of a range.

    The range must begin on the grid of strides, so that a position's result does not depend on where reading began.
    """
    assert reading.by_document or wanted.start % reading.stride == 0
    read = _in_documents if reading.by_document else _with_memory if reading.memory else _in_windows
    for positions, hidden in read(with_lane_threads(model), stream, reading, wanted=wanted):
        inside = (positions >= wanted.start) & (positions < wanted.stop)
        if inside.all():
            yield positions.reshape(-1), hidden.flatten(0, 1)
        elif inside.any():
            yield positions[inside], hidden[torch.from_numpy(inside).to(hidden.device)]


def _inputs(stream: TokenStream, positions: np.ndarray, device: torch.device) -> Tensor:
    """Returns the token before each position, on a device; positions beyond the end of the stream are only padding."""
    return torch.from_numpy(stream.inputs(np.minimum(positions, len(stream) - 1))).to(device)


def _in_windows(model: LanguageModel, stream: TokenStream, reading: Reading, *, wanted: range) -> _Windows:
    """Reads overlapping windows. Those at the very beginning, which have less context, are read one by one."""
    context = reading.segment - reading.stride
    ends = np.arange(wanted.start, wanted.stop, reading.stride) + reading.stride
    early, full = ends[ends < reading.segment], ends[ends >= reading.segment]
    groups = [ends[None] for ends in early] + [full[i : i + reading.lanes] for i in range(0, len(full), reading.lanes)]
    for group in groups:
        length = min(reading.segment, int(group[0]))
        positions = group[:, None] - length + np.arange(length)
        hidden = model.hidden(_inputs(stream, positions, model.device), None)
        kept = min(context, length - reading.stride)
        yield positions[:, kept:], hidden[:, kept:]


def _in_documents(model: LanguageModel, stream: TokenStream, reading: Reading, *, wanted: range) -> _Windows:
    """Reads overlapping windows within documents. Shorter ones are padded on the right, where no token looks."""
    start, stop = wanted.start, wanted.stop
    windows = [
        window
        for document in range(*stream.documents_of(np.array([start, stop - 1])) + np.array([0, 1]))
        for window in _windows_of_document(int(stream.begins[document]), int(stream.ends[document]), reading)
        if window[2] > start and window[1] < stop
    ]
    for group in (windows[i : i + reading.lanes] for i in range(0, len(windows), reading.lanes)):
        begins = np.array([begin for begin, _, _ in group])[:, None]
        positions = begins + np.arange(max(last - begin for begin, _, last in group))
        inputs = _inputs(stream, positions, model.device)
        inputs[torch.from_numpy(np.isin(begins[:, 0], stream.begins)), 0] = stream.start
        hidden = model.hidden(inputs, None)
        for lane, (begin, first, last) in enumerate(group):
            new = slice(first - begin, last - begin)
            yield positions[lane : lane + 1, new], hidden[lane : lane + 1, new]


def _windows_of_document(begin: int, end: int, reading: Reading) -> Iterator[tuple[int, int, int]]:
    """Yields windows as (first position read, first new position, end); the first window is all new."""
    new = begin
    last = min(end, begin + reading.segment)
    while new < end:
        yield max(begin, last - reading.segment), new, last
        new, last = last, min(end, last + reading.stride)


def _with_memory(model: LanguageModel, stream: TokenStream, reading: Reading, *, wanted: range) -> _Windows:
    """Reads lanes with a carried memory. Those near the start of the text, with less warm-up, are read one by one."""
    first, last = wanted.start // reading.segment, -(-wanted.stop // reading.segment)
    count = last - first
    # In a lane shorter than its warm-up, most of the reading would be warm-up.
    lanes = max(1, min(reading.lanes, count // max(1, reading.warm_up)))
    length = -(-count // lanes)
    starts = list(range(first, last, length))
    alone = [begin for begin in starts if begin < reading.warm_up]
    together = [begin for begin in starts if begin >= reading.warm_up]
    for group in [[begin] for begin in alone] + ([together] if together else []):
        early = min(reading.warm_up, group[0])
        state = model.empty_state(reading.memory, reading.segment)
        begins = np.array(group)[:, None]
        for segment in range(-early, length):
            positions = (begins + segment) * reading.segment + np.arange(reading.segment)
            hidden = model.hidden(_inputs(stream, positions, model.device), state)
            if segment >= 0:
                yield positions, hidden


def log_probabilities(
    model: LanguageModel, split: TokenSplit, reading: Reading, *, positions: range
) -> Float[np.ndarray, "positions"]:
    """Returns log p(x_{t+1} | x_<=t) of every position of a range, in order."""
    model, found = with_lane_threads(model), np.full(len(positions), np.nan, np.float32)
    for group, hidden in hidden_states(model, split, reading, wanted=positions):
        targets = torch.from_numpy(split.targets(group)).to(model.device)
        with torch.inference_mode():
            found[group - positions.start] = model.target_log_probabilities(hidden, targets).cpu().numpy()
    refuse_divergence(found)
    return found


def refuse_divergence(log_probabilities: Float[np.ndarray, "positions"]) -> None:
    """Raises an error if a log-probability is not finite: the model has diverged, and its figures mean nothing."""
    if not np.isfinite(log_probabilities).all():
        raise InputError(
            "the model's log-probabilities are no longer numbers: it has diverged; train it again with a lower "
            "training.optimiser.learning_rate"
        )
