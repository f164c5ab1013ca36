"""What the server refuses, from outside: bad requests, the wrong key, and whom its waiting line has no room for."""

import base64
import threading

import httpx
import pytest
from starlette.testclient import TestClient

from spalm.errors import InputError
from spalm.server import Limits, allowed_hosts
from support.servers import Held, client_of, hang_up, in_thread, open_attached, server_of, wait_until

PROMPT = "ka1 lo2 mi3 .\nka1 lo2"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "ka1"}]


@pytest.fixture(scope="module")
def client(attached) -> TestClient:
    return client_of(server_of(attached, limits=Limits(body_bytes=1 << 16, max_tokens=100)))


def test_a_model_without_a_template_does_not_chat(attached_folder):
    found = client_of(server_of(open_attached(attached_folder))).post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "ka1"}]}
    )
    assert found.status_code == 400
    assert "tiny has no chat template; use /v1/completions" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "there is no model 'other'; this server has 'tiny'"),
        (COMPLETIONS, {"prompt": "ka1 " * 200}, 400, "128 is the most"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 128}, 400, "128 is the most"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 101}, 400, "this server writes at most 100"),
        (COMPLETIONS, {"prompt": [5, 328]}, 400, "there is no token 328"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "there is no token -1"),
        (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "a"}}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, 400, "at most 64"),
        (COMPLETIONS, {"prompt": "a", "n": 65}, 400, "at most 64"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n: "),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs: "),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature: "),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p: "),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens: "),
        (COMPLETIONS, {"prompt": "a", "seed": 1 << 70}, 400, "seed: "),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty: "),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x" * (1 << 16)}, 413, "65,536 bytes"),
        (COMPLETIONS, ["a"], 400, "the body: "),
        (CHAT, {"messages": []}, 400, "messages: "),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content: "),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "no tools here"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, 400, "tools: "),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {"messages": HELLO, "model": "other"}, 404, "there is no model"),
        (COMPLETIONS, {"prompt": "a", "n": int("9" * 4299)}, 400, "n: "),
        (COMPLETIONS, {"prompt": ["a"] * 11, "n": int("9" * 4299)}, 400, "n: "),
        (COMPLETIONS, {"prompt": "a", "max_tokens": int("9" * 4299)}, 400, "max_tokens: "),
        (COMPLETIONS, {"prompt": "a", "top_k": 1 << 64}, 400, "top_k: "),
        (COMPLETIONS, {"prompt": [1 << 64]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "model": "x" * 2000}, 400, "model: "),
        (COMPLETIONS, {"prompt": "ka1 " * 2000}, 400, "8,000 bytes; for a context of 128 tokens 4,096 is the most"),
        (CHAT, {"messages": [{"role": "user", "content": "ka1 " * 2000}]}, 400, "4,096 is the most"),
        ("/v1/embeddings", {"input": "ka1 " * 2000}, 400, "4,096 is the most"),
        ("/v1/embeddings", {"input": [-5]}, 400, "there is no token -5"),
        ("/v1/embeddings", {"input": [1 << 40]}, 400, "there is no token"),
        ("/api/generate", {"model": "tiny", "options": {"seed": 1 << 70}}, 422, "options.seed: "),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"top_k": -1}}, 422, "top_k: "),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"stop": ["a"] * 17}}, 422, "stop"),
        ("/api/passage", {"text": "a", "entries_off": [1 << 70]}, 422, "entries_off.0: "),
        ("/api/passage", {"place": {"split": "dev", "document": 0, "offset": 2**63 - 1}}, 422, "place.offset: "),
        ("/api/token", {"text": "a", "position": 2**63}, 422, "position: "),
        ("/explain", {"text": "a", "position": 2**63}, 422, "position"),
        ("/explain", {"text": "x" * 65_000}, 422, "65,000 signs"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
        ("/v1/embeddings", {}, 400, "input: Field required"),
        ("/explain", {}, 422, "either a text or a prompt"),
        ("/explain", {"text": "ka1", "position": 9}, 422, "the passage has 2 tokens"),
        ("/explain", {"text": "ka1", "position": [0, -1]}, 422, "position"),
        ("/memory/documents", {"name": "a"}, 422, "text: "),
        ("/memory/documents", {"name": "", "text": "a"}, 422, "name: "),
        ("/memory/documents", {"name": "a", "text": ""}, 422, "nothing in it to remember"),
        ("/memory/documents", {"name": "a", "text": "a", "path": "/etc"}, 422, "path: "),
    ],
)
def test_bad_requests_get_their_status_and_the_server_lives_on(client, path, body, status, problem):
    found = client.post(path, json=body)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert problem in (error["message"] if path.startswith("/v1/") else error)
    if path.startswith("/v1/"):
        assert set(error) == {"message", "type", "param", "code"}
    streaming = client.post(path, json={**body, "stream": True}) if isinstance(body, dict) else found
    assert streaming.status_code == status  # it is not too late to say so
    assert client.get("/health").json()["status"] == "ok"


def test_errors_have_the_codes_that_clients_look_for(client):
    long = client.post(COMPLETIONS, json={"prompt": "ka1 " * 200}).json()["error"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "prompt")
    other = client.post(COMPLETIONS, json={"prompt": "a", "model": "other"}).json()["error"]
    assert (other["code"], other["param"], other["type"]) == ("model_not_found", "model", "not_found_error")


@pytest.mark.parametrize("narrow", [{"top_p": 1e-320}, {"temperature": 1e-320}, {"top_k": 2**31 - 1}])
def test_the_narrowest_sampling_is_answered(client, narrow):
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, **narrow}).status_code == 200


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, int("9" * 4299), "9" * 4400])
def test_offsets_and_limits_have_bounds(client, number):
    for name in ("offset", "limit"):
        found = client.get("/memory/documents", params={name: number})
        assert found.status_code == 422
        assert found.json()["error"].startswith(f"{name}: ")


def test_malformed_bodies_are_refused(client):
    bodies = (b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b"[" * 60_000, b"")
    for body in bodies:
        found = client.post(COMPLETIONS, content=body, headers=JSON)
        assert found.status_code == 400, body[:40]
        assert found.json()["error"]["message"]
    assert (
        client.post(COMPLETIONS, content=iter([b"x" * 7000] * 20), headers=JSON).status_code == 413
    )  # no length given
    assert client.get("/health").status_code == 200


def test_a_key_is_asked_for(attached):
    key = "schlüssel 1"
    client = client_of(server_of(attached, key=key, hosts=allowed_hosts("127.0.0.1")))
    assert client.get("/health").status_code == 200
    password = base64.b64encode(f"anyone:{key}".encode()).decode()
    for path in ("/", "/explorer.js", "/v1/models", "/metrics", "/memory/documents", "/api/about"):
        for wrong in (None, "Bearer", "Bearer nothing", "Basic ###", f"Basic {password[:-4]}", "Bearer \xfc\xff", key):
            headers = {} if wrong is None else {"Authorization": wrong.encode()}
            found = client.get(path, headers=headers)
            assert found.status_code == 401, (path, wrong)
        assert found.headers["www-authenticate"].startswith("Bearer" if path == "/v1/models" else "Basic")
        for right in (f"Bearer {key}", f"bearer {key}", f"Basic {password}"):
            assert client.get(path, headers={"Authorization": right.encode()}).status_code == 200, path
    assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400
    with pytest.raises(InputError, match="key is empty"):
        server_of(attached, key="")


def test_when_the_line_is_full_others_are_turned_away(attached):
    held, limits = Held(), Limits(waiting=2)
    app = server_of(attached, held, limits=limits)
    asked = {"prompt": PROMPT, "max_tokens": 4}
    with in_thread(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        statuses: list[int] = []
        waiting = [
            threading.Thread(
                target=lambda: statuses.append(
                    httpx.post(f"{address}{COMPLETIONS}", json=asked, timeout=60).status_code
                )
            )
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: app.state.queue.size == 2)
        for path, more in (
            (COMPLETIONS, {}),
            (COMPLETIONS, {"stream": True}),
            (CHAT, {"messages": HELLO, "stream": True}),
            ("/explain", None),
            ("/memory/documents", None),
            ("/api/passage", None),
        ):
            body = (
                {"text": "ka1"} | ({"name": "a"} if "documents" in path else {}) if more is None else {**asked, **more}
            )
            found = client.post(path, json=body)
            assert found.status_code == 429, path
            assert found.headers["retry-after"] == "1"
        for path in ("/health", "/metrics", "/v1/models", "/memory/documents", "/"):
            assert client.get(path).status_code == 200
        assert "spalm_refused_total 6" in client.get("/metrics").text
        held.let_go()
        for thread in waiting:
            thread.join(60)
        assert statuses == [200, 200]
        assert app.state.queue.size == 0
        assert client.post(COMPLETIONS, json=asked).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_leaves_makes_room(attached, stream):
    held = Held()
    app = server_of(attached, held, limits=Limits(waiting=2))
    with in_thread(app) as address:
        asked = {"prompt": PROMPT, "max_tokens": 50, "stream": stream}
        leaving = [httpx.Client(base_url=address, timeout=60) for _ in range(2)]

        def ask(client: httpx.Client) -> None:
            try:
                client.post(COMPLETIONS, json=asked)
            except httpx.HTTPError:
                return

        threads = [threading.Thread(target=ask, args=(client,)) for client in leaving]
        threads[0].start()
        wait_until(held.begun.is_set)
        threads[1].start()
        wait_until(lambda: app.state.queue.size == 2)
        hang_up(leaving[1])  # in line
        wait_until(lambda: app.state.queue.size == 1)
        held.let_go(3)
        hang_up(leaving[0])  # while it is answered
        held.let_go(1)
        wait_until(lambda: app.state.queue.size == 0)
        held.let_go()
        assert (
            httpx.post(f"{address}{COMPLETIONS}", json={"prompt": "nu1", "max_tokens": 2}, timeout=60).status_code
            == 200
        )
        for thread in threads:
            thread.join(60)
