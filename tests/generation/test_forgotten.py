"""A memory that has forgotten documents beside one that never held them: what is left is nothing."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from spalm.compute import Hardware
from spalm.generation import Model, load_model
from spalm.memory import Memory
from spalm.neighbours import IndexKind, IndexSettings, make_searcher
from support.servers import copied

SECRETS = {
    f"secret {number}": " ".join(f"{word}{(number * 7 + place) % 30}" for place, word in enumerate(words * 9)) + " .\n"
    for number, words in enumerate((["ka", "nu", "lo"], ["mi", "ka"], ["nu", "nu", "lo", "mi", "ka"]))
}
"""Texts of words that the memory has, in an order that no document of it has."""


def opened(folder: Path, to: Path, kind: IndexKind) -> Model:
    """A copy of a model with its memory, with an index of some kind made anew."""
    shutil.rmtree(copied(folder, to) / "index", ignore_errors=True)
    make_searcher(Memory(to / "memory"), to / "index", IndexSettings(kind=kind))
    return load_model(to, Hardware("cpu", 1))


@torch.inference_mode()
def distributions(model: Model, text: str) -> tuple[Tensor, list[int]]:
    """The log-probabilities of the whole vocabulary at every token of a text, and the tokens."""
    tokens = model.tokeniser.encode([text.encode()])[0][:100].tolist()
    decoder = model.decoder()
    return decoder.predict(decoder.feed([model.tokeniser.start, *tokens[:-1]]), tokens[-1])[0].log_probabilities, tokens


def ranks(model: Model) -> np.ndarray:
    """The rank of the true token at every position of the secrets."""
    found = []
    for text in SECRETS.values():
        scores, tokens = distributions(model, text)
        own = scores.gather(-1, torch.tensor(tokens)[:, None])
        found.append((1 + (scores > own).sum(-1)).numpy())
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "faiss"])
def test_what_was_forgotten_leaves_probabilities_and_answers_as_if_it_had_never_been_there(
    attached_folder, tmp_path, kind
):
    never = opened(attached_folder, tmp_path / "never" / "memory of words", kind)
    model = opened(attached_folder, tmp_path / "held" / "memory of words", kind)
    for name, text in SECRETS.items():
        model.memory.add(name, text)
    held = ranks(model)
    for name in SECRETS:
        assert model.memory.forget(name) == 1
    for text in SECRETS.values():
        found, expected = distributions(model, text)[0], distributions(never, text)[0]
        if kind == "exact":
            assert torch.equal(found, expected), "to the bit"
        else:
            torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-4, atol=1e-5)
        prompt = text[:40]
        one, other = (each.generate(prompt, max_tokens=12, temperature=0) for each in (model, never))
        assert (one.text, one.citations) == (other.text, other.citations)
        assert not {*SECRETS} & {source.document for each in one.citations for source in each.sources}
    left, without = ranks(model), ranks(never)
    assert (held == 1).mean() > (without == 1).mean() + 0.2, "the test would see a member"
    assert (left == without).all(), "of a forgotten one it sees nothing"
