"""A memory without a network: keys that are a function of a few tokens, quick to make and easy to check."""

from types import SimpleNamespace

import numpy as np
import torch

from spalm.corpus import TokenStream
from spalm.memory import Memory

WIDTH = 7


class StubEncoder:
    """The key of a position is a fixed random vector of its token and the one before it."""

    entries_per_shard = None

    def __init__(self, digest: str = "stub", width: int = WIDTH, vocabulary: int = 50):
        self.digest, self.width, self.vocabulary = digest, width, vocabulary
        self.reading = SimpleNamespace(stride=2, segment=4, memory=0)
        self.table = np.random.default_rng(len(digest)).standard_normal((vocabulary, width)).astype(np.float32)

    @property
    def identity(self):
        return {"encoder": {"digest": self.digest, "width": self.width, "vocabulary": self.vocabulary}, "reading": {}}

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """The keys of all positions of a text."""
        before = np.concatenate([[0], tokens[:-1]])
        return (self.table[tokens] + 0.5 * self.table[before]).astype(np.float16)

    def keys(self, stream, start, stop, to_keys, width, progress=lambda _: None):  # noqa: ARG002
        progress(stop - start)
        return to_keys(torch.from_numpy(self.of(np.asarray(stream.tokens, np.int64))[start:stop].astype(np.float32)))


def stream(texts: dict[str, list[int]]) -> TokenStream:
    tokens = np.array([token for text in texts.values() for token in text], np.int64)
    return TokenStream(tokens, np.cumsum([len(text) for text in texts.values()]), lambda: list(texts), start=0)


def new_memory(directory, encoder: StubEncoder) -> Memory:
    return Memory.create(directory, {**encoder.identity, "width": encoder.width})


def random_texts(random: np.random.Generator, count: int, prefix: str = "text") -> dict[str, list[int]]:
    return {f"{prefix}-{number}": random.integers(0, 50, random.integers(1, 30)).tolist() for number in range(count)}
