"""Models with a memory as models of transformers: what they say, and what is generated with them."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from spalm.api import attach_and_export
from spalm.attachment import Attached, AttachSettings
from spalm.compute import Execution, Hardware
from spalm.corpus.tokeniser import BpeTokeniser
from spalm.errors import InputError
from spalm.generation import EncodedTokens, load_model
from spalm.lm.pretrained.folder import PretrainedFolder
from spalm.runs import ROWS
from support.facts import write_documents
from support.model_folders import TEXTS, rewrite
from support.tiny_models import ARCHITECTURES

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from spalm.generation.hugging_face.model import BatchCache, SpalmConfig, SpalmForCausalLM


def plain_of(attached_folder: Path):
    return AutoModelForCausalLM.from_pretrained(Attached(attached_folder, Hardware("cpu", 1)).base.folder.path)


def test_the_auto_classes_know_it(attached_folder, finished, model, own_model):
    for folder, found in ((attached_folder, model), (finished.directory, own_model)):
        assert type(found) is SpalmForCausalLM
        assert type(AutoConfig.from_pretrained(folder)) is SpalmConfig
    assert own_model.config.model == "adaptive"
    assert own_model.memory_model.name.endswith("/adaptive")


def test_logits_are_log_probabilities(both):
    model, tokenizer = both
    logits = model(**tokenizer(TEXTS[0], return_tensors="pt")).logits
    assert logits.shape[-1] == model.config.vocab_size
    assert_close(logits.exp().sum(-1), torch.ones(logits.shape[:2]))


def test_without_its_memory_it_is_the_plain_model(model, tokenizer, attached_folder):
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    expected = plain_of(attached_folder)(**ids).logits.log_softmax(-1)
    assert (model(**ids).logits - expected).abs().max() > 0.01
    model.use_memory = False
    assert_close(model(**ids).logits, expected, rtol=1e-4, atol=1e-4)
    model.use_memory = True


def test_a_runs_model_without_its_memory_is_its_network(own_model, own_tokenizer):
    ids = own_tokenizer(TEXTS[0], return_tensors="pt").input_ids
    opened = own_model.memory_model
    encoded = opened.decoder().feed(opened.tokeniser.prompt(TEXTS[0]))
    network = opened.network.log_probabilities(encoded.hidden)[1:]
    assert (own_model(ids).logits[0, :, :-1] - network).abs().max() > 0.01
    own_model.use_memory = False
    assert_close(own_model(ids).logits[0, :, :-1], network)
    own_model.use_memory = True


def test_a_runs_texts_begin_after_the_start_symbol_given_or_not(own_model, own_tokenizer):
    ids, tokeniser = own_tokenizer(TEXTS[0]).input_ids, own_model.memory_model.tokeniser
    assert own_tokenizer.bos_token_id == tokeniser.size == own_model.config.vocab_size - 1
    assert tokeniser.prompt(TEXTS[0]) == [tokeniser.start, *ids]
    assert own_tokenizer.decode(ids, skip_special_tokens=True) == tokeniser.decode(ids)
    given, not_given = (own_model(torch.tensor([[*before, *ids]])).logits[0] for before in ([tokeniser.size], []))
    assert_close(given[1:], not_given)
    assert (given[:, -1] == -torch.inf).all()
    first = own_model.generate(max_new_tokens=5, do_sample=False)[0].tolist()
    assert first[0] == tokeniser.size
    assert first[1] == int(given[0].argmax())


@pytest.mark.parametrize("name", ROWS)
def test_any_model_of_a_run_is_what_the_server_gives(finished, name):
    model = AutoModelForCausalLM.from_pretrained(finished.directory, model=name)
    opened = load_model(finished.directory, Hardware("cpu", 1), name)
    assert model.memory_model.name == opened.name
    prompt = opened.tokeniser.prompt(TEXTS[0])
    decoder = opened.decoder()
    expected = decoder.predict(decoder.feed(prompt), prompt[-1])[0].log_probabilities
    found = model(torch.tensor([[opened.tokeniser.size, *prompt[1:]]])).logits[0, :, :-1]
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_a_run_has_not_is_refused(finished, attached_folder):
    with pytest.raises(InputError, match="has adaptive"):
        SpalmForCausalLM.from_pretrained(finished.directory, model="gpt")
    with pytest.raises(InputError, match="is one model with its memory; leave it out"):
        SpalmForCausalLM.from_pretrained(attached_folder, model="spalm")


def test_a_run_of_before_gets_its_files(finished, tmp_path):
    run = shutil.copytree(finished.directory, tmp_path / "run")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (run / name).unlink(missing_ok=True)
    SpalmForCausalLM.from_pretrained(run)
    assert AutoConfig.from_pretrained(run).model == "adaptive"
    assert AutoTokenizer.from_pretrained(run)("ka1").input_ids


def test_the_loss_is_of_the_labels_that_count(both):
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    labels = ids.clone()
    labels[0, 2:4] = -100
    said = model(ids, labels=labels, logits_to_keep=1)
    counted = [place for place in range(1, ids.shape[1]) if place not in (2, 3)]
    expected = -torch.stack([said.logits[0, place - 1, ids[0, place]] for place in counted]).mean()
    assert_close(said.loss, expected)


def test_only_the_wanted_logits_are_made(both):
    model, tokenizer = both
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    whole = model(**batch).logits
    assert_close(model(**batch, logits_to_keep=2).logits, whole[:, -2:])
    places = torch.tensor([batch.input_ids.shape[1] - 1, 0, 3])
    assert_close(model(**batch, logits_to_keep=places).logits, whole[:, places])


def test_a_cache_changes_nothing(both):
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    whole = model(ids, use_cache=False)
    assert whole.past_key_values is None
    first = model(ids[:, :3], use_cache=True)
    second = model(ids[:, 3:], past_key_values=first.past_key_values, use_cache=True)
    assert second.past_key_values.get_seq_length() == ids.shape[1]
    assert_close(torch.cat([first.logits, second.logits], 1), whole.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_a_cache_is_generation_without(both, how):
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    with_cache, without = (
        model.generate(**ids, max_new_tokens=9, do_sample=False, use_cache=use_cache, **how).tolist()
        for use_cache in (True, False)
    )
    assert with_cache == without
    assert len(with_cache[0]) > ids.input_ids.shape[1]


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_batch_is_what_its_texts_are_alone(both, how):
    model, tokenizer = both
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, **how}
    alone = [model.generate(**tokenizer(text, return_tensors="pt"), **how)[0, -9:].tolist() for text in TEXTS]
    together = model.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True), **how)[:, -9:].tolist()
    assert together == alone


def test_beams_find_what_is_likelier(both):
    """Three beams end no worse than greed does, by the model's own word."""
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}

    def score(found: torch.Tensor) -> float:
        logits = model(found[:, :-1]).logits[0, ids.input_ids.shape[1] - 1 :]
        return float(logits.gather(-1, found[0, ids.input_ids.shape[1] :, None]).sum())

    assert score(model.generate(**ids, **how, num_beams=7)) >= score(model.generate(**ids, **how)) - 1e-4


def test_samples_follow_the_seed(both):
    model, tokenizer = both
    ids = tokenizer(TEXTS[0], return_tensors="pt")

    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return model.generate(**ids, max_new_tokens=12, do_sample=True, top_p=0.95)[0].tolist()

    assert sample(1) == sample(1) != sample(2)


def test_pipelines(both, attached_folder, finished):
    model, tokenizer = both
    folder = attached_folder if model.pretrained else finished.directory
    how = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    ids = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), max_new_tokens=5, do_sample=False)[0, -5:]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    for made in (
        pipeline("text-generation", model=model, tokenizer=tokenizer),
        pipeline("text-generation", str(folder)),
    ):
        assert made(TEXTS[0], **how)[0]["generated_text"].split() == expected.split()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_architecture_may_be_the_base(tiny, attached_folder, tmp_path, architecture):
    """Each with the memory of another: good for nothing, but read and combined all the same."""
    folder = shutil.copytree(attached_folder, tmp_path / "attached")
    base = tiny(architecture)
    rewrite(folder / "attached.json", model=str(base), digest=PretrainedFolder(base).digest())
    rewrite(folder / "config.json", base=json.loads((base / "config.json").read_text()))
    model, plain = map(AutoModelForCausalLM.from_pretrained, (folder, base))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", pad_token="<|end|>")
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    there = batch.attention_mask.bool()
    with_memory = model(**batch).logits[there]
    assert_close(with_memory.exp().sum(-1), torch.ones(len(with_memory)))
    model.use_memory = False
    expected = plain(**batch).logits.log_softmax(-1)[there]
    assert_close(model(**batch).logits[there], expected, rtol=1e-3, atol=1e-3)
    assert (with_memory - expected).abs().max() > 0.01
    model.use_memory = True
    how = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    found = model.generate(**batch, **how)
    assert found.tolist() == model.generate(**batch, **how, use_cache=False).tolist()
    alone = [model.generate(**tokenizer(text, return_tensors="pt"), **how)[0, -7:].tolist() for text in TEXTS]
    assert found[:, -7:].tolist() == alone
    model.save_pretrained(tmp_path / "copy")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert_close(again(**batch).logits[there], with_memory)
    assert again.generate(**batch, **how).tolist() == found.tolist()


@dataclass
class Noted:
    """A decoder that notes what it is fed."""

    read: list[int] = field(default_factory=list)

    def feed(self, tokens: list[int]) -> EncodedTokens:
        self.read += tokens
        return EncodedTokens(torch.tensor(tokens)[:, None], np.array(tokens)[:, None], np.array(tokens)[:, None])

    def copied(self) -> "Noted":
        return Noted(list(self.read))

    def __len__(self) -> int:
        return len(self.read)


def test_texts_of_a_batch_are_followed_each_by_itself():
    tokeniser = BpeTokeniser.learn(lambda: iter([b"the cat"]), 260, mark_documents=True)
    texts = [Noted(), Noted(), Noted()]
    followed = iter(texts)
    cache = BatchCache(SimpleNamespace(tokeniser=tokeniser, decoder=lambda: next(followed)), 3, tokeniser.start)
    heard = cache.feed([[7, 5], [tokeniser.start, 9], []], 4)
    assert [text.read for text in texts] == [[tokeniser.start, 7, 5], [tokeniser.start, 9], []]
    assert [each.hidden[:, 0].tolist() for each in heard] == [[7, 5], [tokeniser.start, 9], []]
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    heard = cache.feed([[1], [2], [3]], 1)
    assert [text.read[1:] for text in cache._texts] == [[9, 1], [9, 2], [7, 5, 3]]
    assert cache.get_seq_length() == 5


@pytest.mark.slow
def test_a_real_model_with_a_memory(smollm2, tmp_path):
    """Converted from a GGUF file within the folder: equal without its memory, and whole wherever it is copied to."""
    gguf, converted = smollm2
    shutil.copytree(converted, tmp_path / "attached" / "model", copy_function=os.link)
    texts = tmp_path / "texts"
    texts.mkdir()
    write_documents(texts)
    for path in sorted(texts.iterdir())[6:]:
        path.unlink()
    for path in texts.iterdir():
        path.write_text(path.read_text()[:250])
    adaptive = {"neighbours": 16, "passes": 2}
    sizes = {"context": 64, "stride": 48, "neighbours": 16, "positions": 128, "memory": "both"}
    settings = AttachSettings.parse({**sizes, "adaptive": adaptive}, "test")
    folder = attach_and_export(
        str(gguf), [texts], tmp_path / "attached", settings=settings, execution=Execution(Hardware("cpu", 1))
    ).directory
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(next(texts.iterdir()).read_text()[:60], return_tensors="pt")
    said = model(**ids).logits
    assert_close(said.exp().sum(-1), torch.ones(said.shape[:2]), rtol=0, atol=1e-3)
    model.use_memory = False
    plain = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)(**ids).logits.log_softmax(-1)
    assert_close(model(**ids).logits, plain, rtol=1e-3, atol=1e-3)
    assert (said - plain).abs().max() > 0.01
    model.use_memory = True
    how = {"max_new_tokens": 4, "do_sample": False}
    found = model.generate(**ids, **how)
    assert found.tolist() == model.generate(**ids, **how, use_cache=False).tolist()
    model.save_pretrained(tmp_path / "copy")
    shutil.rmtree(folder)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    assert_close(copy(**ids).logits, said)
    assert copy.generate(**ids, **how).tolist() == found.tolist()
