"""The web application from outside: what it answers, and what it refuses."""

import socket

import pytest
from starlette.testclient import TestClient

from spalm.errors import InputError
from spalm.serving import allowed_hosts, make_app, serve


@pytest.fixture(scope="module")
def client(explorer) -> TestClient:
    return TestClient(make_app(explorer, allowed_hosts("127.0.0.1")), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def document(finished) -> str:
    return finished.corpus.split("test").names[0]


def test_the_page_and_the_api_answer(client, document):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/explorer.js").status_code == client.get("/explorer.css").status_code == 200
    about = client.get("/api/about").json()
    assert [each["name"] for each in about["models"] if each["memory"]][:2] == ["knn-lm", "spalm"]
    assert client.get("/api/documents", params={"split": "test", "containing": "TEST-0"}).json() == [
        {"name": document, "tokens": 750}
    ]
    question = {"place": {"split": "test", "document": document, "length": 30}}
    found = client.post("/api/passage", json=question)
    assert found.status_code == 200
    assert found.headers["content-type"] == "application/json"
    assert len(found.json()["tokens"]) == 30
    token = client.post("/api/token", json={**question, "position": 29})
    assert token.json()["probability"].keys() == found.json()["models"].keys()


def test_text_is_data(client, document):
    """Markup in text and in names comes back as it is, in JSON: the page makes text nodes of it."""
    hostile = "<script>alert(1)</script> <img src=x onerror=alert(3)>"
    found = client.post("/api/passage", json={"text": hostile})
    assert found.headers["content-type"] == "application/json"
    assert found.json()["tokens"][0] == "<script>alert(1)</script>"
    assert "<img" in document


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/api/passage", {}, 422, "either a text or a place"),
        ("/api/passage", {"text": "a", "place": {"split": "test", "document": "b"}}, 422, "either a text or a place"),
        ("/api/passage", {"text": "ka1 " * 2500}, 422, "2,500 tokens"),
        ("/api/passage", {"place": {"split": "train", "document": "a"}}, 422, ""),
        ("/api/passage", {"place": {"split": "test", "document": "../corpus"}}, 422, "no document '../corpus'"),
        ("/api/passage", {"text": "a", "path": "/etc/passwd"}, 422, ""),
        ("/api/passage", {"text": "x" * (1 << 20)}, 413, "1,048,576 bytes"),
        ("/api/token", {"text": "ka1 .", "position": 2}, 422, "the passage has 2 tokens"),
        ("/api/token", {"text": "ka1 .", "position": -1}, 422, ""),
        ("/api/nothing", {}, 405, ""),
    ],
)
def test_bad_questions_get_their_status_and_the_server_lives_on(client, path, body, status, problem):
    found = client.post(path, json=body)
    assert found.status_code == status
    assert problem in found.json().get("error", "")
    assert client.get("/api/about").status_code == 200


def test_malformed_bodies_are_refused(client):
    found = client.post("/api/passage", content=b"{", headers={"Content-Type": "application/json"})
    assert found.status_code == 422
    endless = client.post("/api/passage", content=iter([b"x" * 70_000] * 20))  # no length given
    assert endless.status_code == 413


@pytest.mark.parametrize(
    "path",
    ["/../api.py", "/%2e%2e/api.py", "/..%2fapi.py", "/%2e%2e%2f%2e%2e%2fcli.py", "//etc/passwd", "/page/../../api.py"],
)
def test_nothing_outside_of_the_page_can_be_read(client, path):
    assert client.get(path).status_code == 404


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
            serve(client.app, "127.0.0.1", port, "the explorer")
