"""Answers side by side: each is what it would be alone, and beginnings of prompts are read once."""

import pytest

import spalm
from spalm.generation import AnswerBatch, AnswerRequest, Decoder, GenerationOptions, Model, Sampling
from support.generation import generated

TEXTS = ["ka1 lo2 mi3 .\nka1 lo2", "nu1", "lo2 mi3", "ka1 lo2 mi3 .\nka1"]
LONG = [f"{word} " * 20 + "lo2 mi3" for word in ("ka1", "nu2", "mi4", "lo7")]
"""Texts that begin differently, long enough for a copy to be worth it."""


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


def answered(batch: AnswerBatch, model: Model, text: str) -> tuple[str, int]:
    """An answer, and how many tokens of its prompt were not read."""
    before = batch.reused_tokens
    batch.add(request(model, text))
    return finish(batch), batch.reused_tokens - before


def length(model: Model, text: str) -> int:
    return len(model.tokeniser.prompt(text))


def test_the_beginning_of_a_prompt_is_read_once(model):
    batch = AnswerBatch(model, slots=2)
    first, reused = answered(batch, model, LONG[0])
    assert reused == 0
    longer = LONG[0] + first + " mi3"
    text, reused = answered(batch, model, longer)
    assert text == alone(model, longer)
    assert reused >= length(model, LONG[0])
    other = AnswerRequest(
        model.tokeniser.prompt(longer), GenerationOptions(Sampling(max_tokens=9), score_prompt=True), echo=[""] * 999
    )
    reused = batch.reused_tokens
    batch.add(other)
    finish(batch)
    assert batch.reused_tokens == reused, "every position of the prompt is scored"


def test_conversations_in_turn_go_on_where_they_were(model):
    batch = AnswerBatch(model, slots=3)
    whole = [length(model, text) - 1 for text in LONG]
    found = [answered(batch, model, LONG[number]) for number in (0, 1, 0, 1, 2, 0)]
    assert [text for text, _ in found] == [alone(model, LONG[number]) for number in (0, 1, 0, 1, 2, 0)]
    assert [reused for _, reused in found] == [0, 0, whole[0], whole[1], 0, whole[0]]
    assert answered(batch, model, LONG[3])[1] == 0  # takes the slot that was not used for longest
    assert [answered(batch, model, LONG[number])[1] for number in (2, 0, 1)] == [whole[2], whole[0], 0]


def test_what_is_kept_never_takes_more_than_the_slots(model):
    batch = AnswerBatch(model, slots=2)
    for number in (0, 1, 2, 0, 3, 2, 2, 0):
        batch.add(request(model, LONG[number], tokens=40))
        batch.add(request(model, LONG[number] + " nu1", tokens=3))
        while batch.running:
            batch.step()
            assert len(batch.running) - len(batch._unbegun) + len(batch._kept) <= 2


def test_requests_that_arrive_together_read_once_what_they_begin_with(model):
    batch = AnswerBatch(model, slots=4)
    asked = [LONG[0] + end for end in (" ka1", " lo2 mi3", "", " nu1")]
    answers = [batch.add(request(model, text)) for text in asked]
    texts = dict.fromkeys(map(id, answers), "")
    while batch.running:
        for answer, chunks in batch.step():
            texts[id(answer)] += "".join(chunk.text for chunk in chunks)
    assert list(texts.values()) == [alone(model, text) for text in asked]
    assert batch.reused_tokens >= 3 * (length(model, LONG[0]) - 1)


def test_one_that_joins_goes_on_from_a_running_answer(model):
    batch = AnswerBatch(model, slots=2)
    first = batch.add(request(model, LONG[0], tokens=20))
    for _ in range(3):
        batch.step()
    second = batch.add(request(model, LONG[0] + " nu1"))
    texts = {id(first): "", id(second): ""}
    while batch.running:
        for answer, chunks in batch.step():
            texts[id(answer)] += "".join(chunk.text for chunk in chunks)
    assert batch.reused_tokens >= length(model, LONG[0]) - 1
    assert texts[id(second)] == alone(model, LONG[0] + " nu1")
    assert alone(model, LONG[0], 20).endswith(texts[id(first)])


def test_an_answer_that_fails_leaves_the_others_as_they_are(model, monkeypatch):
    """It cannot begin, or nothing can be picked for it; the others go on."""
    batch = AnswerBatch(model, slots=3)
    answered(batch, model, LONG[0])
    staying = batch.add(request(model, LONG[1]))
    with monkeypatch.context() as changed:
        changed.setattr(Decoder, "take_back", lambda *_: 1 / 0)
        failing = batch.add(request(model, LONG[0]))
        text = "".join(chunk.text for answer, chunks in batch.step() if answer is staying for chunk in chunks)
    assert isinstance(failing.error, ZeroDivisionError)
    picking = batch.add(request(model, TEXTS[1]))
    monkeypatch.setattr(picking.generation, "take", lambda *_: 1 / 0)
    text += finish(batch)
    assert isinstance(picking.error, ZeroDivisionError)
    assert (staying.error, text) == (None, alone(model, LONG[1]))
    monkeypatch.undo()
    assert answered(batch, model, LONG[0])[0] == alone(model, LONG[0])


def test_an_answer_that_is_removed_leaves_the_others_as_they_are(model):
    batch = AnswerBatch(model, slots=2)
    leaving, staying = batch.add(request(model, TEXTS[0])), batch.add(request(model, TEXTS[1]))
    batch.step()
    batch.remove(leaving)
    assert batch.running == [staying]
    text = alone(model, TEXTS[1])
    assert text.endswith(finish(batch))
