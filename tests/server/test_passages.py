"""Passages of the memory in the prompts of requests, in OpenAI's form and in Ollama's."""

import json
import threading

import httpx
import pytest
from starlette.testclient import TestClient

from spalm.generation import Model
from spalm.generation.passages import PassageIndex
from spalm.server import Limits
from support.servers import PATIENCE, client_of, copied, in_thread, open_attached, server_of, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = "zz9 qq8"
NOTE = "zz9 qq8 zz7 qq6 zz9 qq8 zz7 .\n"
TEXT = NOTE.strip()


@pytest.fixture
def client(attached, tmp_path) -> TestClient:
    """A client of a server whose memory holds a note."""
    folder = copied(attached.directory, tmp_path / "tiny")
    client = client_of(server_of(open_attached(folder), limits=Limits(max_tokens=40)))
    assert client.post("/memory/documents", json={"name": "note.md", "text": NOTE}).status_code == 201
    return client


def ask(client: TestClient, path: str, **asked) -> dict:
    found = client.post(path, json={"model": "tiny", **asked})
    assert found.status_code == 200, found.text
    return found.json()


def message(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_completions(client):
    asked = {"max_tokens": 4, "temperature": 0}
    found = ask(client, COMPLETIONS, prompt=QUESTION, passages=2, **asked)
    (choice,) = found["choices"]
    (passage,) = choice["passages"]
    assert passage["score"] > 0
    assert {name: passage[name] for name in ("document", "offset")} == {"document": "note.md", "offset": 0}
    by_hand = ask(client, COMPLETIONS, prompt=f"{TEXT}\n\n{QUESTION}", **asked)
    assert "passages" not in by_hand["choices"][0]
    assert (choice["text"], found["usage"]) == (by_hand["choices"][0]["text"], by_hand["usage"])
    several = ask(client, COMPLETIONS, prompt=[QUESTION, "nothing-of-the-kind"], n=2, passages=1, **asked)
    assert [[each["document"] for each in one["passages"]] for one in several["choices"]] == [["note.md"]] * 2 + [
        []
    ] * 2
    without = ask(client, COMPLETIONS, prompt=QUESTION, passages=1, memory=False, **asked)
    assert without["choices"][0]["passages"], "passages alone"


def test_chat_puts_them_into_the_last_message_of_the_user(client):
    heading = f"Use what is relevant of these passages:\n\n{TEXT}\n\n"
    before = [*message("zz9"), {"role": "assistant", "content": "y"}]
    asked = {"max_tokens": 4, "temperature": 0}
    found = ask(client, CHAT, messages=[*before, *message(QUESTION)], passages=1, **asked)
    by_hand = ask(client, CHAT, messages=[*before, *message(heading + QUESTION)], **asked)
    assert [each["document"] for each in found["choices"][0]["passages"]] == ["note.md"]
    assert found["usage"] == by_hand["usage"]
    assert found["choices"][0]["message"] == by_hand["choices"][0]["message"]
    nobody = ask(client, CHAT, messages=[{"role": "system", "content": QUESTION}], passages=1, **asked)
    assert nobody["choices"][0]["passages"] == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_name_them_at_the_end(client, path):
    given = {"prompt": QUESTION} if path == COMPLETIONS else {"messages": message(QUESTION)}
    found = client.post(path, json={**given, "max_tokens": 3, "stream": True, "passages": 1, "cite": True})
    *events, _, _ = found.text.split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [("passages" in each) for each in choices] == [False] * (len(choices) - 1) + [True]
    assert "citations" in choices[-1]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/api/generate", {"prompt": QUESTION}),
        ("/api/generate", {"prompt": QUESTION, "raw": True}),
        ("/api/chat", {"messages": message(QUESTION)}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_routes(client, path, given, stream):
    asked = {"model": "tiny", "stream": stream, "options": {"num_predict": 3, "temperature": 0}, **given}
    found = client.post(path, json={**asked, "passages": 1})
    assert found.status_code == 200, found.text
    *parts, last = [json.loads(line) for line in found.text.splitlines()]
    assert not any("passages" in part for part in parts)
    assert [each["document"] for each in last["passages"]] == ["note.md"]
    assert "passages" not in client.post(path, json=asked).text


def test_a_forgotten_document_is_in_no_answer(client):
    assert ask(client, COMPLETIONS, prompt=QUESTION, passages=1)["choices"][0]["passages"]
    assert client.delete("/memory/documents/note.md").status_code == 200
    assert ask(client, COMPLETIONS, prompt=QUESTION, passages=1)["choices"][0]["passages"] == []


def test_what_cannot_be_done_is_refused(client):
    for asked, status, why in (
        ({"prompt": QUESTION, "passages": 9}, 400, "passages"),
        ({"prompt": QUESTION, "passages": -1}, 400, "passages"),
        ({"prompt": QUESTION, "passages": 1, "echo": True}, 400, "echo"),
        ({"prompt": [1, 2], "passages": 1}, 400, "give the prompt as text"),
        ({"prompt": [[1, 2]], "passages": 1}, 400, "give the prompt as text"),
        ({"prompt": "x " * 200, "passages": 1}, 400, "128 is the most"),
    ):
        found = client.post(COMPLETIONS, json=asked)
        assert found.status_code == status, asked
        assert why in found.json()["error"]["message"]
    assert client.post("/api/chat", json={"model": "tiny", "messages": message("x"), "passages": 9}).status_code == 422


@pytest.mark.parametrize("length", [None, 2, 30, 40])
def test_prompts_with_passages_fit_the_context(client, length):
    """The model reads 128 tokens. If nothing is said of the answer's length, a quarter is left for it."""
    for path, given in ((COMPLETIONS, {"prompt": "ka1 lo2 mi3"}), (CHAT, {"messages": message("ka1 lo2 mi3")})):
        found = ask(client, path, passages=8, temperature=0, **given, **({"max_tokens": length} if length else {}))
        assert found["choices"][0]["passages"]
        reserved = length or (16 if path == COMPLETIONS else 32)
        assert found["usage"]["prompt_tokens"] <= 128 - reserved
        assert found["usage"]["prompt_tokens"] > 128 - reserved - 20


def test_requests_without_passages_do_not_wait_while_a_memory_is_divided(attached, monkeypatch):
    begun, let_go = threading.Event(), threading.Event()
    best = PassageIndex.best

    def wait(self: PassageIndex, text: str, count: int):
        begun.set()
        assert let_go.wait(PATIENCE)
        return best(self, text, count)

    monkeypatch.setattr(PassageIndex, "best", wait)
    app = server_of(attached)
    with in_thread(app) as address:

        def post(passages: int) -> httpx.Response:
            asked = {"prompt": QUESTION, "max_tokens": 2, "passages": passages}
            return httpx.post(f"{address}{COMPLETIONS}", json=asked, timeout=PATIENCE)

        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(post(1).status_code)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            assert begun.wait(PATIENCE)
            wait_until(lambda: app.state.queue.size == 4)
            assert post(0).status_code == 200
            assert not let_go.is_set()
            assert answers == []
        finally:
            let_go.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert answers == [200] * 4


def test_no_request_makes_an_index_unless_it_asks_for_passages(attached, model: Model):
    client = client_of(server_of(attached, lambda _: model))
    assert client.post(COMPLETIONS, json={"prompt": QUESTION, "max_tokens": 1}).status_code == 200
    assert len(model.models.passages) == 0
