"""Reading a stream: many lanes give the numbers of one."""

import numpy as np
import pytest
import torch

from spalm.corpus import TokenStream
from spalm.lm import NetworkSettings, Reading, Transformer, hidden_states, log_probabilities
from spalm.lm.pretrained import PretrainedFolder

CPU = torch.device("cpu")


@pytest.fixture
def model(corpus):
    settings = NetworkSettings(layers=2, width=14, heads=2, head_width=5, feed_forward=11)
    return Transformer(settings, corpus.vocabulary).initialise(1).eval()


def one_stream(model, split, segment: int, memory: int) -> np.ndarray:
    """The obvious way: one lane, from the beginning, full distributions."""
    state = model.empty_state(memory, segment) if memory else None
    tokens = [split.start, *map(int, split.tokens)]
    found = []
    for first in range(0, len(split), segment):
        last = min(first + segment, len(split))
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([tokens[first:last]]), state)
            log_p = model.log_probabilities(hidden)[0]
        found += [log_p[i, tokens[first + i + 1]].item() for i in range(last - first)]
    return np.array(found, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 3, 7, 20])
def test_batched_equals_one_stream(model, corpus, memory):
    split = corpus.split("train")
    expected = one_stream(model, split, 7, memory)
    for lanes in (1, 2, 5, 100):
        found = log_probabilities(
            model, split, Reading.of(2, segment=7, memory=memory, lanes=lanes), positions=range(len(split))
        )
        np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=f"{lanes} lanes")


@pytest.mark.parametrize("memory", [0, 5])
def test_a_part_of_the_stream_is_as_in_the_whole(model, corpus, memory):
    split, reading = corpus.split("train"), Reading.of(2, segment=7, memory=memory, lanes=3)
    whole = log_probabilities(model, split, reading, positions=range(len(split)))
    part = log_probabilities(model, split, reading, positions=range(700, 1001))
    np.testing.assert_allclose(part, whole[700:1001], atol=2e-5)


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_overlapping_windows_have_the_left_context_they_promise(model, corpus, stride):
    split = corpus.split("dev")
    found = log_probabilities(
        model, split, Reading.of(2, segment=7, memory=0, lanes=4, stride=stride), positions=range(60)
    )
    tokens = [split.start, *map(int, split.tokens)]
    for position in range(60):
        end = (position // stride + 1) * stride
        begin = max(0, end - 7)
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([tokens[begin : position + 1]]), None)
        expected = model.log_probabilities(hidden)[0, -1, tokens[position + 1]].item()
        assert found[position] == pytest.approx(expected, abs=2e-5)


def test_every_position_comes_once(model, corpus):
    split = corpus.split("dev")
    groups = hidden_states(model, split, Reading.of(2, segment=7, memory=5, lanes=3), wanted=range(len(split)))
    positions = np.concatenate([positions for positions, _ in groups])
    assert sorted(positions) == list(range(len(split)))


LENGTHS = [5, 1, 23, 64, 13, 100, 2, 31]
"""Lengths of documents: shorter than a window of 13, as long, and longer."""


@pytest.fixture(scope="module")
def documents() -> TokenStream:
    tokens = np.random.default_rng(5).integers(0, 29, sum(LENGTHS))
    return TokenStream(tokens, np.cumsum(LENGTHS), lambda: list(map(str, LENGTHS)), start=3)


def alone(segment: int, stride: int, lanes: int) -> Reading:
    return Reading(segment, 0, stride, lanes, warm_up=0, by_document=True)


def all_hidden(model, split, reading: Reading, cuts: list[int]) -> torch.Tensor:
    """Returns the hidden state of every position, read in parts that end at the cuts; each must come just once."""
    found, seen = torch.zeros(len(split), model.width), np.zeros(len(split), int)
    for start, stop in zip([0, *cuts], [*cuts, len(split)]):
        for positions, hidden in hidden_states(model, split, reading, wanted=range(start, stop)):
            assert ((positions >= start) & (positions < stop)).all()
            found[positions] = hidden
            np.add.at(seen, positions, 1)
    assert (seen == 1).all()
    return found


@pytest.fixture(scope="module")
def small():
    settings = NetworkSettings(layers=2, width=14, heads=2, head_width=5, feed_forward=11)
    return Transformer(settings, 29).initialise(1).eval()


@torch.no_grad()
def test_documents_that_fit_a_window_are_read_alone_and_whole(small, documents):
    found = all_hidden(small, documents, alone(100, 71, 3), [])
    for begin, end in zip(documents.begins, documents.ends):
        text = [documents.start, *documents.tokens[begin : end - 1].tolist()]
        torch.testing.assert_close(found[begin:end], small.hidden(torch.tensor([text]), None)[0], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 5, 13])
def test_longer_documents_are_read_in_windows_of_their_own(small, documents, stride):
    """The first is new as a whole; each further one ends `stride` later and begins 13 before its end."""
    found = all_hidden(small, documents, alone(13, stride, 1), [])
    for begin, end in zip(documents.begins, documents.ends):
        text = [documents.start, *documents.tokens[begin : end - 1].tolist()]
        for offset in range(end - begin):
            strides = max(0, -(-(offset + 1 - 13) // stride))
            last = min(len(text), 13 + stride * strides)
            seen = text[max(0, last - 13) : offset + 1]
            expected = small.hidden(torch.tensor([seen]), None)[0, -1]
            torch.testing.assert_close(found[begin + offset], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lanes", [1, 2, 5, 100])
@pytest.mark.parametrize("cuts", [[], [7], [6, 29, 30, 93, 150, 206], list(range(1, 239))])
def test_reading_by_document_depends_on_neither_lanes_nor_cuts(small, documents, lanes, cuts):
    whole = all_hidden(small, documents, alone(13, 7, 1), [])
    found = all_hidden(small, documents, alone(13, 7, lanes), cuts)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_a_pretrained_model_is_not_disturbed_by_what_fills_its_lanes(tiny, documents):
    model = PretrainedFolder(tiny("gpt2")).load(CPU)
    one, many = (all_hidden(model, documents, alone(64, 48, lanes), []) for lanes in (1, 5))
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-4)
