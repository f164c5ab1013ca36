"""A GGUF model run by llama.cpp beside the same model run by torch."""

import gc

import pytest
import torch

from spalm.compute import available_cores
from spalm.errors import InputError
from spalm.lm import BatchReader, IncrementalReader, Reading
from spalm.lm.pretrained import LlamaModel, PretrainedFolder

pytestmark = pytest.mark.slow
pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install 'spalm[llama]'")
CPU = torch.device("cpu")
TOKENS = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4727, 314]
BY_DOCUMENT = Reading(1024, 0, 768, 1, warm_up=0, by_document=True)


@pytest.fixture(scope="module")
def model(smollm2) -> LlamaModel:
    return LlamaModel(smollm2[0], threads=available_cores(), context=512, sequences=3)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).square().mean().sqrt() < 0.05 * expected.std())


def test_it_predicts_what_torch_predicts(model, smollm2):
    of_torch = PretrainedFolder(smollm2[1]).load(CPU)
    assert (model.width, model.vocabulary) == (of_torch.width, of_torch.vocabulary)
    found = model.read([(model.empty_state(), TOKENS)])[0]
    expected = of_torch.hidden(torch.tensor([TOKENS]))[0]
    likeness = torch.cosine_similarity(found.hidden, expected)
    assert likeness.min() > 0.98
    log_p = found.logits.log_softmax(-1)
    torch.testing.assert_close(log_p.exp(), of_torch.log_probabilities(expected).exp(), rtol=0, atol=0.1)
    torch.testing.assert_close(model.embed(torch.tensor(TOKENS)), of_torch.embed(torch.tensor(TOKENS)))
    assert close(model.log_probabilities(found.hidden), log_p)
    targets = torch.tensor(TOKENS)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(model.target_log_probabilities(found.hidden, targets), expected, rtol=0.05, atol=0.1)


def test_several_texts_are_read_in_one_pass_as_each_would_be_alone(model):
    assert isinstance(model, BatchReader)
    alone = [model.read([(model.empty_state(), text)])[0] for text in (TOKENS, TOKENS[3:9])]
    first, second = model.empty_state(), model.empty_state()
    begun = model.read([(first, TOKENS[:5])])[0]
    rest, other = model.read([(first, TOKENS[5:]), (second, TOKENS[3:9])])
    assert close(torch.cat([begun.logits, rest.logits]), alone[0].logits)
    assert close(other.logits, alone[1].logits)


def test_a_text_can_be_shortened_and_copied(model):
    state = model.empty_state()
    whole = model.read([(state, TOKENS)])[0]
    model.shorten(state, 4)
    other = model.copy_state(state)
    for each in (state, other):
        assert each.tokens == 4
        assert close(model.read([(each, TOKENS[4:])])[0].logits, whole.logits[4:])


def test_a_model_that_cannot_be_shortened_says_so(model, monkeypatch):
    """As llama.cpp does of recurrent models, or if it forgot something else than it was told to."""
    assert model.can_shorten
    assert IncrementalReader(model, BY_DOCUMENT, CPU).can_shorten
    state = model.empty_state()
    model.read([(state, TOKENS)])
    remove = model._api.llama_memory_seq_rm
    with monkeypatch.context() as changed:
        changed.setattr(model._api, "llama_memory_seq_rm", lambda *about: about[2] < 0 and remove(*about))
        with pytest.raises(RuntimeError, match=r"cannot take back the last tokens"):
            model.shorten(state, 4)
        assert state.tokens == len(TOKENS)
        assert not model._shortens_exactly()
    with monkeypatch.context() as changed:
        changed.setattr(model._api, "llama_memory_seq_rm", lambda *about: (about[2] < 0 and remove(*about)) or True)
        assert not model._shortens_exactly()
    assert model._shortens_exactly()


def test_a_sequence_is_free_again_when_its_text_is_no_longer_used(model):
    states = [model.empty_state() for _ in range(3)]
    with pytest.raises(InputError, match="all sequences are in use"):
        model.empty_state()
    model.read([(states[0], TOKENS)])
    del states
    gc.collect()
    fresh = model.empty_state()
    assert model.read([(fresh, TOKENS)])[0].hidden.shape == (len(TOKENS), model.width)


def test_a_growing_text_is_read_with_logits(model):
    reader = IncrementalReader(model, BY_DOCUMENT, CPU)
    parts = [reader.read(TOKENS[:7]), reader.read(TOKENS[7:])]
    copied = reader.copied()
    whole = model.hidden(torch.tensor([TOKENS]))[0]
    assert close(torch.cat([part.hidden for part in parts]), whole)
    assert all(part.logits is not None for part in parts)
    del reader
    gc.collect()
    assert len(copied.read(TOKENS[:2]).hidden) == 2


def test_what_cannot_be_read_is_one_line(model, tmp_path):
    with pytest.raises(InputError, match="does not exist; give the path of a GGUF file"):
        LlamaModel(tmp_path / "absent.gguf", threads=1)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(InputError, match=r"cannot be opened by llama\.cpp"):
        LlamaModel(tmp_path / "text.gguf", threads=1)
    with pytest.raises(InputError, match="is not in its vocabulary"):
        model.read([(model.empty_state(), [model.vocabulary])])
    reader = IncrementalReader(model, BY_DOCUMENT, CPU)
    with pytest.raises(InputError, match="the model reads at most 512; give less"):
        reader.read([1] * 513)
