"""The thread of the model: fair between requests, and other work is done between the steps of answers."""

import threading

import pytest

from spalm.generation import AnswerBatch, AnswerRequest, GenerationOptions, Model, Sampling
from spalm.server.model_thread import ModelThread, ServerStopping
from support.servers import PATIENCE


def requests(model: Model, count: int, tokens: int) -> list[AnswerRequest]:
    options = GenerationOptions(Sampling(max_tokens=tokens))
    return [AnswerRequest(model.tokeniser.prompt("ka1 lo2"), options, choice=number) for number in range(count)]


class Client:
    """Counts finished answers and notes when the last came."""

    def __init__(self, answers: int, order: list[str], name: str):
        self.left, self.order, self.name = answers, order, name
        self.done = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, found) -> None:
        if isinstance(found, BaseException):
            self.error = found
        else:
            self.left -= sum(chunk.finish_reason is not None for chunk in found)
        if self.error or not self.left:
            self.order.append(self.name)
            self.done.set()


def test_a_request_for_many_answers_does_not_keep_another_waiting(model):
    thread, order = ModelThread(AnswerBatch(model, slots=2)), list[str]()
    many, one = Client(8, order, "many"), Client(1, order, "one")
    held = threading.Event()
    thread.call(lambda: held.wait(PATIENCE))
    thread.answer(requests(model, 8, 6), many)
    thread.answer(requests(model, 1, 6), one)
    work = thread.call(lambda: order.append("work"))
    held.set()
    assert many.done.wait(PATIENCE)
    assert work.result.result(PATIENCE) is None
    assert order[-1] == "many"
    assert set(order) == {"many", "one", "work"}
    thread.stop(PATIENCE)


def test_an_error_ends_the_answers_at_hand_and_nothing_else(model, monkeypatch):
    thread, order = ModelThread(AnswerBatch(model, slots=2)), list[str]()
    failing, after = Client(1, order, "failing"), Client(1, order, "after")
    with monkeypatch.context() as changed:
        changed.setattr(type(model.combiner), "combine", lambda *_: 1 / 0)
        thread.answer(requests(model, 1, 4), failing)
        assert failing.done.wait(PATIENCE)
    assert isinstance(failing.error, ZeroDivisionError)
    thread.answer(requests(model, 1, 4), after)
    assert after.done.wait(PATIENCE)
    assert after.error is None
    thread.stop(PATIENCE)


def test_nothing_is_begun_after_the_end(model):
    thread = ModelThread(AnswerBatch(model, slots=1))
    assert thread.call(lambda: 7).result.result(PATIENCE) == 7
    thread.stop(PATIENCE)
    with pytest.raises(ServerStopping):
        thread.call(lambda: 8)
