"""The web application from outside: what it answers, and what it refuses."""

import asyncio
import socket

import pytest
from starlette.testclient import TestClient

from spalm.compute import Hardware
from spalm.errors import InputError
from spalm.generation import RunModels
from spalm.server import allowed_hosts, make_explorer_server, serve


@pytest.fixture(scope="module")
def client(finished) -> TestClient:
    models = RunModels(finished, Hardware("cpu", 1))
    return TestClient(make_explorer_server(models, allowed_hosts("127.0.0.1")), base_url="http://127.0.0.1")


def test_the_page_and_the_api_answer(client, finished):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/explorer.js").status_code == client.get("/explorer.css").status_code == 200
    about = client.get("/api/about").json()
    assert [each["name"] for each in about["models"] if each["memory"]][:2] == ["knn-lm-literal", "knn-lm"]
    assert client.get("/api/documents", params={"split": "test", "containing": "TEST-0"}).json() == [
        {"number": 0, "name": finished.corpus.split("test").names[0], "tokens": 750}
    ]
    question = {"place": {"split": "test", "document": 0, "length": 30}}
    found = client.post("/api/passage", json=question)
    assert found.status_code == 200
    assert found.headers["content-type"] == "application/json"
    assert len(found.json()["tokens"]) == 30
    traced = client.post("/api/trace", json=question).json()
    assert traced["least"] == 6
    assert all({*span} == {"start", "end", "count", "sources"} for span in traced["spans"])
    token = client.post("/api/token", json={**question, "position": 29})
    assert token.json()["probability"].keys() == found.json()["models"].keys()


def test_text_is_data(client, finished):
    """Markup in text and in names comes back as it is, in JSON: the page makes text nodes of it."""
    hostile = "<script>alert(1)</script> <img src=x onerror=alert(3)>"
    found = client.post("/api/passage", json={"text": hostile})
    assert found.headers["content-type"] == "application/json"
    assert found.json()["tokens"][0] == "<script>alert(1)</script>"
    assert "<img" in finished.corpus.split("test").names[0]


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/api/passage", {}, 422, "either a text or a place"),
        ("/api/passage", {"text": "a", "place": {"split": "test", "document": 0}}, 422, "either a text or a place"),
        ("/api/passage", {"text": "ka1 " * 2500}, 422, "2,500 tokens"),
        (
            "/api/passage",
            {"place": {"split": "train", "document": 0}},
            422,
            "place.split: Input should be 'dev' or 'test'",
        ),
        ("/api/passage", {"place": {"split": "test", "document": "../corpus"}}, 422, "place.document: "),
        ("/api/passage", {"text": "a", "path": "/etc/passwd"}, 422, "path: Extra inputs are not permitted"),
        ("/api/passage", {"text": "x" * (1 << 20)}, 413, "1,048,576 bytes"),
        ("/api/token", {"text": "ka1 .", "position": 2}, 422, "the passage has 2 tokens"),
        ("/api/token", {"text": "ka1 .", "position": -1}, 422, "position: "),
        ("/api/nothing", {}, 405, "Method Not Allowed"),
    ],
)
def test_bad_questions_get_their_status_and_the_server_lives_on(client, path, body, status, problem):
    found = client.post(path, json=body)
    assert found.status_code == status
    assert problem in found.json()["error"]
    assert client.get("/api/about").status_code == 200


def test_malformed_bodies_are_refused(client):
    headers = {"Content-Type": "application/json"}
    for body in (b"{", b"\xff", b'{"text": "\\ud800"}', b'{"text": "ka1", "entries_off": [Infinity]}', b"[" * 100_000):
        found = client.post("/api/passage", content=body, headers=headers)
        assert found.status_code in (400, 422), body[:40]
        assert found.json()["error"]
    endless = client.post("/api/passage", content=iter([b"x" * 70_000] * 20), headers=headers)  # no length given
    assert endless.status_code == 413


@pytest.mark.parametrize(
    "path", ["/../api.py", "/../../cli.py", "/..\\api.py", "//etc/passwd", "/page/../../api.py", "/./../explorer.py"]
)
def test_nothing_outside_of_the_page_can_be_read(client, path):
    """The path as it stands: a client would tidy it up before sending it."""
    answered = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        answered.append(message)

    about = {"query_string": b"", "headers": [(b"host", b"127.0.0.1")], "scheme": "http", "http_version": "1.1"}
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "", **about}
    asyncio.run(client.app(scope, receive, send))
    assert answered[0]["status"] == 404


def test_pages_of_other_names_cannot_reach_it(client):
    """A page elsewhere whose name was made to point to this machine sends its own name along."""
    assert client.get("/api/about", headers={"Host": "evil.example"}).status_code == 400
    assert allowed_hosts("0.0.0.0") == ["*"]


def test_a_port_that_is_taken_is_told(client):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: Address already in use; give another one"):
            serve(client.app, "127.0.0.1", port, title="the explorer")
