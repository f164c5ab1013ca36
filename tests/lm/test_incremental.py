"""A text that grows, in pieces of any length, has the hidden states of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spalm.corpus import TokenStream
from spalm.errors import InputError
from spalm.lm import IncrementalReader, NetworkSettings, Reading, Transformer, hidden_states
from spalm.lm.pretrained import PretrainedFolder

CPU = torch.device("cpu")
LENGTH = 61
READINGS = {
    "carried, shorter than a segment": Reading.of(2, segment=7, memory=3, lanes=1),
    "carried, a segment": Reading.of(2, segment=7, memory=7, lanes=1),
    "carried, longer": Reading.of(2, segment=5, memory=17, lanes=1),
    "windows side by side": Reading.of(2, segment=7, memory=0, lanes=1),
    "overlapping windows": Reading.of(2, segment=11, memory=0, lanes=1, stride=3),
    "windows a token apart": Reading.of(2, segment=7, memory=0, lanes=1, stride=1),
}


@pytest.fixture(scope="module")
def model():
    sizes = NetworkSettings(layers=2, width=14, heads=2, head_width=5, feed_forward=11)
    return Transformer(sizes, 23).initialise(1).eval()


def stream(length: int, vocabulary: int, ends: list[int] | None = None) -> TokenStream:
    tokens = np.random.default_rng(3).integers(0, vocabulary, length)
    ends = ends or [length]
    return TokenStream(tokens, np.array(ends), lambda: [str(end) for end in ends], start=2)


def at_once(model, text: TokenStream, reading: Reading) -> torch.Tensor:
    found = torch.zeros(len(text), model.width)
    for positions, hidden in hidden_states(model, text, reading, wanted=range(len(text))):
        found[positions] = hidden
    return found


def in_pieces(following: IncrementalReader, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    found = []
    while tokens:
        size = sizes[len(found) % len(sizes)]
        found.append(following.feed(tokens[:size]))
        tokens = tokens[size:]
    return torch.cat(found)


def inputs(text: TokenStream) -> list[int]:
    return text.inputs(np.arange(len(text))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@given(sizes=st.lists(st.integers(1, LENGTH), min_size=1, max_size=7))
@settings(max_examples=12, deadline=None)
def test_pieces_of_any_size_are_the_whole(model, reading, sizes):
    text = stream(LENGTH, 23)
    following = IncrementalReader(model, reading, CPU)
    found = in_pieces(following, inputs(text), sizes)
    assert len(following) == LENGTH
    torch.testing.assert_close(found, at_once(model, text, reading), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [[1], [2, 5, 3, 7], [60]])
def test_pieces_of_a_document_are_the_document(tiny, sizes):
    model = PretrainedFolder(tiny("llama")).load(CPU)
    reading = Reading(64, 0, 48, 1, 0, by_document=True)
    text = stream(LENGTH, model.vocabulary)
    found = in_pieces(IncrementalReader(model, reading, CPU), inputs(text), sizes)
    torch.testing.assert_close(found, at_once(model, text, reading), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_copy_goes_its_own_way(model, reading):
    tokens = inputs(stream(LENGTH, 23))
    original, straight = IncrementalReader(model, reading, CPU), IncrementalReader(model, reading, CPU)
    original.feed(tokens[:19])
    copied = original.copied()
    copied.feed([5] * 17)
    found = original.feed(tokens[19:])
    torch.testing.assert_close(found, straight.feed(tokens)[19:], rtol=0, atol=1e-5)
    assert (len(original), len(copied)) == (LENGTH, 19 + 17)


def test_a_copy_of_a_pretrained_models_goes_its_own_way(tiny):
    model = PretrainedFolder(tiny("llama")).load(CPU)
    reading = Reading(64, 0, 48, 1, 0, by_document=True)
    tokens = inputs(stream(29, model.vocabulary))
    original = IncrementalReader(model, reading, CPU)
    original.feed(tokens[:19])
    copied = original.copied()
    copied.feed([5] * 7)
    found = original.feed(tokens[19:])
    torch.testing.assert_close(found, IncrementalReader(model, reading, CPU).feed(tokens)[19:], rtol=1e-4, atol=1e-4)


def test_more_than_a_model_can_read_is_refused_and_nothing_is_read(tiny):
    model = PretrainedFolder(tiny("llama")).load(CPU)
    following = IncrementalReader(model, Reading(64, 0, 48, 1, 0, by_document=True), CPU)
    following.feed([1] * 100)
    with pytest.raises(InputError, match="129 tokens: the model reads at most 128"):
        following.feed([1] * 29)
    assert len(following.feed([1] * 28)) == 28


def test_nothing_fed_is_nothing_heard(model):
    following = IncrementalReader(model, READINGS["carried, a segment"], CPU)
    assert following.feed([]).shape == (0, model.width)
