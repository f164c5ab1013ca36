"""The thread of the model: fair between requests, and other work is done between the steps of answers."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from spalm.generation import (
    AnswerBatch,
    AnswerRequest,
    AttachedModels,
    GenerationOptions,
    Model,
    Sampling,
    model_of,
)
from spalm.generation.models import Network
from spalm.lm.pretrained import PretrainedFolder
from spalm.server.model_thread import ModelThread, ServerStopping
from support.generation import generated
from support.servers import PATIENCE, client_of, copied, open_attached, server_of
from support.tiny_models import with_window

LONG = "ka1 lo2 mi3 .\n" * 6


def requests(model: Model, count: int, tokens: int) -> list[AnswerRequest]:
    options = GenerationOptions(Sampling(max_tokens=tokens))
    return [AnswerRequest(model.tokeniser.prompt("ka1 lo2"), options, choice=number) for number in range(count)]


class Client:
    """Counts finished answers and notes when the last came."""

    def __init__(self, answers: int, order: list[str], name: str):
        self.left, self.order, self.name = answers, order, name
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.text = ""
        self.tokens = 0

    def __call__(self, found) -> None:
        if isinstance(found, BaseException):
            self.error = found
        else:
            self.left -= sum(chunk.finish_reason is not None for chunk in found)
            self.text += "".join(chunk.text for chunk in found)
            self.tokens += sum(chunk.generated for chunk in found)
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
        changed.setattr(type(model.combiner), "combine", lambda *_, **__: 1 / 0)
        thread.answer(requests(model, 1, 4), failing)
        assert failing.done.wait(PATIENCE)
    assert isinstance(failing.error, ZeroDivisionError)
    thread.answer(requests(model, 1, 4), after)
    assert after.done.wait(PATIENCE)
    assert after.error is None
    thread.stop(PATIENCE)


@pytest.mark.parametrize("name", ["add", "_begin"])
def test_a_request_that_cannot_begin_fails_alone(model, monkeypatch, name):
    thread, order = ModelThread(AnswerBatch(model, slots=2)), list[str]()
    running, failing, after = (Client(1, order, name) for name in ("running", "failing", "after"))
    begin = getattr(AnswerBatch, name)

    def refuse_two_tokens(batch: AnswerBatch, about) -> object:
        request = about if name == "add" else about.request
        return 1 / 0 if request.options.sampling.max_tokens == 2 else begin(batch, about)

    monkeypatch.setattr(AnswerBatch, name, refuse_two_tokens)
    held = threading.Event()
    thread.call(lambda: held.wait(PATIENCE))
    thread.answer(requests(model, 1, 9), running)
    thread.answer(requests(model, 2, 2), failing)
    held.set()
    for client in (running, failing):
        assert client.done.wait(PATIENCE)
    thread.answer(requests(model, 1, 4), after)
    assert after.done.wait(PATIENCE)
    assert isinstance(failing.error, ZeroDivisionError)
    assert (running.error, running.tokens, after.error, after.tokens) == (None, 9, None, 4)
    assert order.count("failing") == 1
    thread.stop(PATIENCE)


def test_an_error_of_one_request_is_its_own_500(attached, monkeypatch):
    client, begin = client_of(server_of(attached)), AnswerBatch._begin
    monkeypatch.setattr(AnswerBatch, "_begin", lambda *_: 1 / 0)
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    monkeypatch.setattr(AnswerBatch, "_begin", begin)
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    raising = TestClient(client.app, base_url="http://127.0.0.1")
    monkeypatch.setattr(AnswerBatch, "_begin", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it reaches the log of whatever runs the server, once
        raising.post("/v1/completions", json={"prompt": "a"})


def test_a_model_that_sees_a_window_answers_the_same_prompt_again(model, tiny, tmp_path):
    """Its cache holds a few tokens, so nothing can be taken back: neither a draft, nor what an earlier answer read."""
    network = PretrainedFolder(with_window(tiny("gemma2"), tmp_path / "gemma", 9)).load(torch.device("cpu"))
    windowed = replace(
        model, variant=replace(model.variant, network=Network("windowed", network, model.variant.network.reading))
    )
    prompt = model.tokeniser.prompt(LONG)
    expected = "".join(token.text for token in generated(windowed, prompt, Sampling(max_tokens=9), use_memory=False))
    options = GenerationOptions(Sampling(max_tokens=9), draft=True)
    thread = ModelThread(AnswerBatch(windowed, slots=2))
    for use_memory in (False, False, True, True):
        client = Client(1, [], "one")
        thread.answer([AnswerRequest(prompt, options, use_memory=use_memory)], client)
        assert client.done.wait(PATIENCE)
        assert (client.error, client.tokens) == (None, 9)
        assert use_memory or client.text == expected
    thread.stop(PATIENCE)


def files_of_memory(folder: Path) -> dict[str, bytes]:
    """The bytes of all entries."""
    return {path.name: path.read_bytes() for path in (folder / "memory" / "shards").rglob("*") if path.is_file()}


def test_answers_go_on_while_a_large_document_is_added(attached_folder, tmp_path):
    """They get a token for each of its windows; neither they nor its entries are other than they would be alone."""
    together, alone = (copied(attached_folder, tmp_path / name) for name in ("together", "alone"))
    text = "".join(f"ka{number % 29} lo{number % 23} mi{number % 19} .\n" for number in range(150))
    model, other = (model_of(AttachedModels(open_attached(folder))) for folder in (together, alone))
    expected = "".join(
        token.text for token in generated(model, model.tokeniser.prompt("ka1 lo2"), Sampling(max_tokens=20))
    )
    thread, client, seen = ModelThread(AnswerBatch(model, slots=2)), Client(1, [], "one"), list[int]()

    def add() -> None:
        seen.append(client.tokens)
        model.memory.add("long", text, check=thread.check)
        seen.append(client.tokens)

    thread.answer(requests(model, 1, 20), client)
    call = thread.call(add)
    call.result.result(PATIENCE)
    assert client.done.wait(PATIENCE)
    thread.stop(PATIENCE)
    assert seen[0] < 5
    assert seen[1] >= 15
    assert (client.error, client.text) == (None, expected)
    other.memory.add("long", text)
    assert files_of_memory(together) == files_of_memory(alone)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": 3 * [LONG]}), ("/api/embed", {"model": "tiny", "input": 3 * [LONG]})],
)
def test_every_text_is_embedded_in_a_call_of_its_own(attached, monkeypatch, path, body):
    calls, call = [], ModelThread.call
    monkeypatch.setattr(ModelThread, "call", lambda thread, work: calls.append(1) or call(thread, work))
    assert client_of(server_of(attached)).post(path, json=body).status_code == 200
    assert len(calls) == 3


def test_nothing_is_begun_after_the_end(model):
    thread = ModelThread(AnswerBatch(model, slots=1))
    assert thread.call(lambda: 7).result.result(PATIENCE) == 7
    thread.stop(PATIENCE)
    with pytest.raises(ServerStopping):
        thread.call(lambda: 8)
