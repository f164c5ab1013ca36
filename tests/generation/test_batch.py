"""Answers side by side: each is what it would be alone, and beginnings of prompts are read once."""

import pytest

import spalm
from spalm.generation import AnswerBatch, AnswerRequest, GenerationOptions, Model, Sampling
from support.generation import generated

TEXTS = ["ka1 lo2 mi3 .\nka1 lo2", "nu1", "lo2 mi3", "ka1 lo2 mi3 .\nka1"]


@pytest.fixture(scope="module")
def model(attached_folder) -> Model:
    return spalm.load(attached_folder, execution=spalm.Execution(spalm.Hardware("cpu", 1)))


def request(model: Model, text: str, tokens: int = 9, **options) -> AnswerRequest:
    asked = GenerationOptions(Sampling(max_tokens=tokens), **options)
    return AnswerRequest(model.tokeniser.prompt(text), asked)


def alone(model: Model, text: str, tokens: int = 9) -> str:
    return "".join(token.text for token in generated(model, model.tokeniser.prompt(text), Sampling(max_tokens=tokens)))


def test_answers_side_by_side_are_what_each_is_alone(model):
    batch, waiting = AnswerBatch(model, slots=2), list(TEXTS)
    texts = dict.fromkeys(TEXTS, "")
    asked = {}
    while waiting or batch.running:
        while waiting and batch.has_room:
            text = waiting.pop(0)
            asked[id(batch.add(request(model, text)))] = text
        assert len(batch.running) <= 2
        for answer, chunks in batch.step():
            texts[asked[id(answer)]] += "".join(chunk.text for chunk in chunks)
    assert texts == {text: alone(model, text) for text in TEXTS}


def finish(batch: AnswerBatch) -> str:
    text = ""
    while batch.running:
        text += "".join(chunk.text for _, chunks in batch.step() for chunk in chunks)
    return text


def test_the_beginning_of_a_prompt_is_read_once(model):
    batch = AnswerBatch(model, slots=2)
    batch.add(request(model, TEXTS[0]))
    first = finish(batch)
    assert batch.reused_tokens == 0
    longer = TEXTS[0] + first + " mi3"
    batch.add(request(model, longer))
    assert finish(batch) == alone(model, longer)
    assert batch.reused_tokens >= len(model.tokeniser.prompt(TEXTS[0])) - 1
    other = AnswerRequest(
        model.tokeniser.prompt(longer), GenerationOptions(Sampling(max_tokens=9), score_prompt=True), echo=[""] * 999
    )
    reused = batch.reused_tokens
    batch.add(other)
    finish(batch)
    assert batch.reused_tokens == reused, "every position of the prompt is scored"


def test_an_answer_that_is_removed_leaves_the_others_as_they_are(model):
    batch = AnswerBatch(model, slots=2)
    leaving, staying = batch.add(request(model, TEXTS[0])), batch.add(request(model, TEXTS[1]))
    batch.step()
    batch.remove(leaving)
    assert batch.running == [staying]
    text = alone(model, TEXTS[1])
    assert text.endswith(finish(batch))
