"""lm-evaluation-harness around a model with a memory, as around any model of transformers."""

import pytest
import torch

from support.model_folders import TEXTS

pytest.importorskip("transformers")
from spalm.generation.hugging_face.model import SpalmForCausalLM


@pytest.fixture
def harness(both):
    """lm-evaluation-harness around the model, as it wraps any."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = both
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)


def asked(kind: str, *arguments) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def scored(model, ids: list[int], first: int) -> torch.Tensor:
    """log p of the tokens from `first` on, one by one."""
    said = model(torch.tensor([ids[:-1]])).logits[0]
    return torch.stack([said[place - 1, ids[place]] for place in range(first, len(ids))])


def test_the_harness_scores_continuations(both, harness):
    model, tokenizer = both
    pairs = [("ka1 lo3", " mi4 ."), ("nu7 ka2 mi4 .\nlo3", " ka2"), ("lo1", " lo1 lo1 lo1 .")]
    found = harness.loglikelihood(asked("loglikelihood", *pairs))
    for (context, continuation), (score, greedy) in zip(pairs, found):
        ids, first = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        expected = scored(model, ids, first)
        best = model(torch.tensor([ids[:-1]])).logits[0, first - 1 :].argmax(-1).tolist()
        assert score == pytest.approx(float(expected.sum()), abs=1e-3)
        assert greedy == (best == ids[first:])


def test_the_harness_scores_whole_texts(both, harness):
    model, tokenizer = both
    found = harness.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in TEXTS)))
    for text, score in zip(TEXTS, found):
        ids = [harness.prefix_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        assert score == pytest.approx(float(scored(model, ids, 1).sum()), abs=1e-3)


def test_the_harness_generates(both, harness):
    model, tokenizer = both
    how = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    found = harness.generate_until(asked("generate_until", *((text, how) for text in TEXTS)))
    for text, said in zip(TEXTS, found):
        ids = tokenizer(text, return_tensors="pt")
        whole = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert said == tokenizer.decode(whole, skip_special_tokens=True).split("\n")[0]


def test_the_harness_opens_a_folder_itself(attached_folder):
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=str(attached_folder), device="cpu", batch_size=2)
    assert type(harness.model) is SpalmForCausalLM
    assert harness.max_length == 128
    ((score, _),) = harness.loglikelihood(asked("loglikelihood", ("ka1", " lo3")))
    assert score < 0
