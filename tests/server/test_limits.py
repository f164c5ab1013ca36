"""Limits on work: the size of an answer, the time of a request, and threads that no request can use up."""

import threading

import httpx
import pytest

from spalm.errors import InputError
from spalm.generation import Sampling
from spalm.server import Limits
from spalm.server.answers import GenerationJob, TokenisedPrompt
from spalm.server.openai.request_parser import RequestParser
from support.servers import PATIENCE, Held, client_of, in_thread, server_of, wait_until

PROMPT = "ka1 lo2 mi3 .\nka1 lo2"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_an_answer_that_would_be_too_large_is_refused(attached):
    client = client_of(server_of(attached, limits=Limits(listed_tokens=60)))

    def ask(path: str = COMPLETIONS, **asked) -> httpx.Response:
        return client.post(path, json={"prompt": [1, 2, 3], "temperature": 0, **asked})

    for too_much in (
        {"max_tokens": 61},
        {"max_tokens": 31, "n": 2},
        {"max_tokens": 21, "logprobs": 2},
        {"max_tokens": 58, "echo": True},
        {"max_tokens": 0, "echo": True, "logprobs": 20},
    ):
        found = ask(**too_much)
        assert found.status_code == 400, too_much
        assert "60 is the most; ask for fewer (n, max_tokens, logprobs, echo)" in found.json()["error"]["message"]
        assert ask(**too_much, stream=True).status_code == 400
    for enough in ({"max_tokens": 30, "n": 2}, {"max_tokens": 17, "logprobs": 2, "echo": True}):
        assert ask(**enough).status_code == 200, enough
    # Where the client named no number, there are as many as there is room for.
    found = ask(CHAT, messages=[{"role": "user", "content": "ka1"}], logprobs=True, top_logprobs=11)
    assert found.status_code == 200
    assert found.json()["usage"]["completion_tokens"] <= 5


def test_listed_tokens_are_counted_by_answers_echo_and_likely_ones():
    prompts = [TokenisedPrompt([1, 2, 3]), TokenisedPrompt([1, 2, 3, 4])]
    job = GenerationJob(prompts, Sampling(max_tokens=5), n=11, echo=True, likely=2)
    assert job.listed_tokens == 11 * (3 + 5 + 4 + 5) * 3
    assert GenerationJob(prompts, None, n=2).listed_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_in_time_with_what_is_there(attached, stream):
    held = Held()
    app = server_of(attached, held, limits=Limits(request_seconds=2))
    held.let_go(3)
    asked = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "stream": stream}
    with in_thread(app) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        found = client.post(COMPLETIONS, json=asked)
        assert found.status_code == 200
        assert '"finish_reason":"length"' in found.text.replace(" ", "")
        if stream:
            assert found.text.endswith("data: [DONE]\n\n")
        else:
            assert 0 < found.json()["usage"]["completion_tokens"] < 50
        nothing = client.post(COMPLETIONS, json=asked)  # the model does not get to it
        assert nothing.status_code == 503
        assert "longer than it may (request_seconds)" in nothing.json()["error"]["message"]
        other = client.post("/explain", json={"text": "ka1"})
        assert other.status_code == 503
        assert app.state.queue.size == 0
        held.let_go()
        wait_until(lambda: client.post(COMPLETIONS, json={**asked, "max_tokens": 2}).status_code == 200)


@pytest.mark.parametrize("what", ["prompts", "lists"])
def test_health_has_a_thread_of_its_own(attached, monkeypatch, what):
    """However many requests are being tokenised, or read lists of documents."""
    let_go, begun = threading.Event(), threading.Semaphore(0)

    def wait(*_) -> None:
        begun.release()
        let_go.wait(PATIENCE)
        raise InputError("enough")

    app = server_of(attached)
    if what == "prompts":
        monkeypatch.setattr(RequestParser, "_checked", wait)
    else:
        monkeypatch.setattr("spalm.generation.documents.DocumentService.documents", wait)
    with in_thread(app) as address:

        def ask() -> None:
            if what == "prompts":
                httpx.post(f"{address}{COMPLETIONS}", json={"prompt": "x" * 1000}, timeout=PATIENCE)
            else:
                httpx.get(f"{address}/memory/documents", timeout=PATIENCE)

        threads = [threading.Thread(target=ask) for _ in range(45)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2 if what == "prompts" else 40):
                assert begun.acquire(timeout=PATIENCE)
            if what == "prompts":
                wait_until(lambda: app.state.queue.size == 45)
            assert httpx.get(f"{address}/health", timeout=PATIENCE).json()["status"] == "ok"
            assert not let_go.is_set()
        finally:
            let_go.set()
            for thread in threads:
                thread.join(PATIENCE)


def test_a_prompt_that_is_too_long_is_not_tokenised(attached, monkeypatch):
    client = client_of(server_of(attached))
    tokenised: list[str] = []
    monkeypatch.setattr(TokenisedPrompt, "of", classmethod(lambda cls, _, prompt: tokenised.append(prompt) or cls([1])))
    assert client.post(COMPLETIONS, json={"prompt": "x" * 200_000}).status_code == 400
    assert client.post(COMPLETIONS, json={"prompt": [1] * 200_000}).status_code == 400
    assert tokenised == []
    assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert tokenised == ["x"]
