"""Keys are the encoder's hidden states, with the left context that was promised."""

import numpy as np
import pytest
import torch

from spalm.lm import NetworkSettings, Reading, Transformer
from spalm.memory import Encoder, Memory, MemorySettings, open_memory, remember, shards, source_of_split

CPU = torch.device("cpu")


def encoder(corpus, memory: int = 0, stride: int = 3, digest: str = "d") -> Encoder:
    settings = NetworkSettings(layers=2, width=14, heads=2, head_width=5, feed_forward=11)
    model = Transformer(settings, corpus.vocabulary).initialise(1).eval()
    reading = Reading.of(2, segment=7, memory=memory, lanes=3, stride=stride)
    return Encoder(digest, 14, corpus.vocabulary, reading, lambda: model, lambda: CPU)


def hidden(model, tokens: list[int], state=None) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden(torch.tensor([tokens]), state)[0]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * 14 * 100)


def test_overlapping_windows(corpus, tmp_path):
    own, split = encoder(corpus), corpus.split("dev")
    memory = open_memory(tmp_path / "memory", own, MemorySettings(), stream=split)
    assert remember(memory, own, split, source=source_of_split(corpus, "dev"))
    tokens = [split.start, *map(int, split.tokens)]
    keys = memory.entries().keys(0, len(split))
    for position in range(0, len(split), 11):
        end = (position // 3 + 1) * 3
        expected = hidden(own.model, tokens[max(0, end - 7) : position + 1])[-1]
        np.testing.assert_allclose(keys[position], expected.numpy(), atol=2e-3)
    np.testing.assert_array_equal(memory.entries().tokens(0, len(split)), split.tokens)
    assert memory.entries().source(0).document == split.names[0]


def test_a_carried_memory(corpus, tmp_path):
    own, split = encoder(corpus, memory=9, stride=7), corpus.split("dev")
    memory = open_memory(tmp_path / "memory", own, MemorySettings(carried=9), stream=split)
    remember(memory, own, split, source=source_of_split(corpus, "dev"))
    tokens = [split.start, *map(int, split.tokens)]
    state = own.model.empty_state(9, 7)
    expected = [hidden(own.model, tokens[first : first + 7], state) for first in range(0, len(split), 7)]
    whole = torch.cat(expected)[: len(split)].numpy()
    np.testing.assert_allclose(memory.entries().keys(0, len(split)), whole, atol=2e-3)


def test_reduced_keys_keep_distances(corpus, tmp_path):
    own, split = encoder(corpus), corpus.split("dev")
    whole = open_memory(tmp_path / "whole", own, MemorySettings(), stream=split)
    narrow = open_memory(tmp_path / "narrow", own, MemorySettings(key_width=10), stream=split)
    for memory in (whole, narrow):
        remember(memory, own, split, source=source_of_split(corpus, "dev"))
    keys, reduced = (memory.entries().keys(0, 60).astype(np.float64) for memory in (whole, narrow))
    assert reduced.shape == (60, 10)
    distances, shorter = (((x[:, None] - x[None]) ** 2).sum(2) for x in (keys, reduced))
    assert (shorter <= distances * 1.01 + 1e-2).all()
    assert shorter.sum() > 0.8 * distances.sum()
    reopened = Memory(narrow.directory)
    found = reopened.keys_of(torch.from_numpy(keys).float())
    np.testing.assert_allclose(found, reduced, atol=5e-3)


def test_training_text_and_more_documents_live_together(corpus, tmp_path):
    own = encoder(corpus)
    memory = open_memory(tmp_path / "memory", own, MemorySettings(), stream=corpus.split("train"))
    for name in ("train", "test"):
        remember(memory, own, corpus.split(name), source=source_of_split(corpus, name))
    train, test = corpus.split("train"), corpus.split("test")
    assert memory.first_id(source_of_split(corpus, "train")) == 0
    assert memory.first_id(source_of_split(corpus, "test")) == len(train)
    assert memory.first_id(source_of_split(corpus, "dev")) is None
    assert memory.entries().source(len(train) + 1).document == test.names[0]
