"""Reading a stream: many lanes give the numbers of one."""

import numpy as np
import pytest
import torch

from spalm.lm import NetworkSettings, Reading, Transformer, hidden_states, log_probabilities

CPU = torch.device("cpu")


@pytest.fixture
def model(corpus):
    settings = NetworkSettings(layers=2, width=14, heads=2, head_width=5, feed_forward=11)
    return Transformer(settings, corpus.vocabulary).initialise(1).eval()


def one_stream(model, split, segment: int, memory: int) -> np.ndarray:
    """The obvious way: one lane, from the beginning, full distributions."""
    state = model.start(memory, segment) if memory else None
    tokens = [split.start, *map(int, split.tokens)]
    found = []
    for first in range(0, len(split), segment):
        last = min(first + segment, len(split))
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([tokens[first:last]]), state)
            log_p = model.log_probabilities(hidden)[0]
        found += [log_p[i, tokens[first + i + 1]].item() for i in range(last - first)]
    return np.array(found, np.float32)


@pytest.mark.parametrize("lanes", [1, 2, 5, 100])
@pytest.mark.parametrize("memory", [0, 3, 7, 20])
def test_batched_equals_one_stream(model, corpus, lanes, memory):
    split = corpus.split("train")
    expected = one_stream(model, split, 7, memory)
    found = log_probabilities(model, split, Reading.of(2, 7, memory, lanes), 0, len(split), CPU)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("memory", [0, 5])
def test_a_part_of_the_stream_is_as_in_the_whole(model, corpus, memory):
    split, reading = corpus.split("train"), Reading.of(2, 7, memory, 3)
    whole = log_probabilities(model, split, reading, 0, len(split), CPU)
    part = log_probabilities(model, split, reading, 700, 1001, CPU)
    np.testing.assert_allclose(part, whole[700:1001], atol=2e-5)


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_overlapping_windows_have_the_left_context_they_promise(model, corpus, stride):
    split = corpus.split("dev")
    found = log_probabilities(model, split, Reading.of(2, 7, 0, 4, stride), 0, 60, CPU)
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
    groups = hidden_states(model, split, Reading.of(2, 7, 5, 3), 0, len(split), CPU)
    positions = np.concatenate([positions for positions, _ in groups])
    assert sorted(positions) == list(range(len(split)))
