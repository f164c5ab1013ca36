"""Requests that are refused before any route sees them: other sites' pages, other forms, too large, too slow."""

import asyncio
import socket
import time

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from spalm.errors import InputError
from spalm.server import Limits, allowed_hosts, check_access
from spalm.server.http import GuardMiddleware, HostMiddleware
from spalm.server.http.hosts import is_loopback
from support.servers import client_of, in_thread, server_of

BODY = b'{"prompt": "a", "max_tokens": 1}'
CHANGING = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/api/generate"),
    ("POST", "/api/chat"),
    ("POST", "/api/passage"),
    ("POST", "/explain"),
    ("POST", "/memory/documents"),
    ("DELETE", "/memory/documents/a"),
    ("DELETE", "/memory/documents?name=a"),
]


@pytest.fixture(scope="module")
def client(attached) -> TestClient:
    return client_of(server_of(attached, limits=Limits(body_bytes=1 << 16), hosts=allowed_hosts("127.0.0.1")))


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_pages_of_other_sites_can_change_and_generate_nothing(client, method, path):
    json = {"Content-Type": "application/json"}
    for wrong in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        found = client.request(method, path, content=BODY, headers={**json, **wrong})
        assert found.status_code == 403, wrong
        assert "a page of another site" in found.text
    for right in ({}, {"Origin": "http://127.0.0.1"}, {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1"}):
        found = client.request(method, path, content=BODY, headers={**json, **right})
        assert found.status_code not in (403, 415), right
    if method == "POST":
        for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "text/json", "application/jsonx"):
            headers = {} if kind is None else {"Content-Type": kind}
            assert client.request(method, path, content=BODY, headers=headers).status_code == 415, kind


def test_reading_is_open_to_links_from_elsewhere(client):
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_the_server_is_reached_by_its_own_names_only(client):
    for name in ("127.0.0.1", "127.0.0.1:8765", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8765"):
        assert client.get("/health", headers={"Host": name}).status_code == 200, name
    for name in ("evil.example", "127.0.0.1.evil.example", "", "[", "[::1", "[::1].evil.example", "::1", "a@b"):
        assert client.get("/health", headers={"Host": name}).status_code == 400, name


def test_names_of_a_server_by_where_it_listens():
    assert {"127.0.0.1", "localhost", "::1"} <= {*allowed_hosts("[::1]")}
    assert {"127.0.0.2", "models.example.org"} <= {*allowed_hosts("127.0.0.2", ["Models.example.org"])}
    assert allowed_hosts("0.0.0.0") == ["*"]
    assert allowed_hosts("0.0.0.0", ["models.example.org"]) == ["models.example.org"]


def test_other_machines_need_a_key_unless_it_is_said():
    for host in ("127.0.0.1", "localhost", "127.3.2.1", "[::1]", "::1"):
        assert is_loopback(host)
        check_access(host, key=False, no_key=False)
    for host in ("0.0.0.0", "::", "[::]"):
        assert not is_loopback(host)
        check_access(host, key=True, no_key=False)
        check_access(host, key=False, no_key=True)
        with pytest.raises(InputError, match="or say --no-key"):
            check_access(host, key=False, no_key=False)
    with pytest.raises(InputError, match="--host is empty"):
        check_access("", key=True, no_key=True)


def light_app(limits: Limits) -> FastAPI:
    """An app that says how many bytes it got."""
    app = FastAPI()

    @app.post("/v1/size")
    async def size(given: dict) -> int:
        return len(given["a"])

    app.add_middleware(GuardMiddleware, limits=limits)
    app.add_middleware(HostMiddleware, hosts=["*"])
    return app


def test_a_length_that_is_too_large_is_refused_unread():
    async def refused(length: bytes) -> dict:
        sent: list[dict] = []

        async def receive():
            raise AssertionError("the body was read")

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        scope = {"type": "http", "method": "POST", "path": "/v1/size", "headers": headers, "query_string": b""}
        await GuardMiddleware(light_app(Limits()), Limits(body_bytes=99))(scope, receive, send)
        return sent[0]

    for length in (b"100", b"9" * 4500):
        assert asyncio.run(refused(length))["status"] == 413


def test_all_bodies_together_have_a_limit():
    """Each is within its own limit; the place of one that has ended is free."""
    client = TestClient(light_app(Limits(body_bytes=1000, all_body_bytes=500)))
    for _ in range(3):
        assert client.post("/v1/size", json={"a": "x" * 400}).json() == 400
        found = client.post("/v1/size", json={"a": "x" * 600})
        assert found.status_code == 429
        assert "try again" in found.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(attached):
    app = server_of(attached, limits=Limits(body_seconds=0.3))
    with in_thread(app) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            slow.sendall(b"Content-Length: 99\r\n\r\n{")
            begun = time.monotonic()
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert time.monotonic() - begun < 20
