"""Bodies of requests: checked within bounds of time and memory, and beside the event loop if they are large."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from spalm.server.documents import DocumentRequest
from spalm.server.explorer.protocol import PassageRequest
from spalm.server.http import JsonRoute, bodies
from spalm.server.http.bodies import MOST_VALUES, checked
from support.servers import client_of, server_of

JSON = {"Content-Type": "application/json"}
BLOCKING_SECONDS = 1.0
"""CPU time from which a request counts as one that stops the server; wrong lists took up to ten times as much."""


@pytest.fixture(scope="module")
def app(attached) -> FastAPI:
    return server_of(attached)


def routes_with_bodies(router: Any) -> Iterator[APIRoute]:
    """The routes of an app or router, those of included routers too."""
    for each in router.routes:
        if hasattr(each, "original_router"):
            yield from routes_with_bodies(each.original_router)
        elif isinstance(each, APIRoute) and each.body_field is not None:
            yield each


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a core schema."""
    if isinstance(schema, dict):
        yield schema
        schema = list(schema.values())
    for each in schema if isinstance(schema, list | tuple) else ():
        yield from schemas(each)


def test_every_body_is_of_bounded_fields(app):
    """The server's own description of its routes names all bodies; a new field is seen here."""
    found = list(routes_with_bodies(app))
    assert len(found) >= 12
    for route in found:
        assert isinstance(route, JsonRoute), route.path
        assert route.body_field is not None
        parts = list(schemas(TypeAdapter(route.body_field.field_info.annotation).core_schema))
        for part in parts:
            if part.get("type") == "list":
                assert part.get("fail_fast") is True, (route.path, part)
            if part.get("type") == "int":
                assert {"ge", "gt"} & part.keys(), (route.path, part)
                assert {"le", "lt"} & part.keys(), (route.path, part)
            if part.get("type") == "dict":  # has no fail_fast
                assert part["values_schema"]["type"] == "any", (route.path, part)


@pytest.mark.parametrize("item", [b"{}", b'"a"', b"1", b"[1]", b"[[]]", b"null", b'{"role":1}'])
def test_wrong_lists_do_not_stop_the_server(app, item):
    client = client_of(app)
    items = b",".join([item] * (800_000 // (len(item) + 1)))
    few = b",".join([item] * (MOST_VALUES // 16))
    begun = time.process_time()
    for path, name in (
        ("/v1/completions", "prompt"),
        ("/v1/embeddings", "input"),
        ("/v1/chat/completions", "messages"),
        ("/api/embed", "input"),
        ("/api/passage", "entries_off"),
        ("/explain", "position"),
    ):
        for many in (items, few):
            found = client.post(path, content=b'{"model":"tiny","%s":[%s]}' % (name.encode(), many), headers=JSON)
            assert found.status_code in (400, 422), (path, item, found.text)
            assert len(found.content) < 500
    assert time.process_time() - begun < BLOCKING_SECONDS * 6


def test_an_error_names_the_first_of_many_unknown_fields(app):
    client, begun = client_of(app), time.process_time()
    surplus = {f"field-{number}": 1 for number in range(MOST_VALUES // 2)}
    for path, body in (
        ("/memory/documents", {"name": "x", "text": "y"}),
        ("/explain", {"text": "y"}),
        ("/api/passage", {"text": "y"}),
        ("/api/token", {"text": "y", "position": 0}),
    ):
        found = client.post(path, content=json.dumps(body | surplus).encode(), headers=JSON)
        assert found.status_code in (400, 422), (path, found.text)
        assert "field-0" in found.text
    with pytest.raises(ValidationError) as caught:
        PassageRequest.model_validate({"place": {"split": "dev", "document": 0, **surplus}, **surplus})
    assert caught.value.error_count() == 2
    assert time.process_time() - begun < BLOCKING_SECONDS * 4


def test_values_are_counted_before_they_are_parsed():
    class Anything(BaseModel):
        items: list[Any] = []

    for item in ("[]", "{}", '""', r'"\\"', "1"):
        most = MOST_VALUES - 4 * (item[0] in "[{")
        many = ",".join([item] * (most // (2 if item[0] in "[{" else 1) - 4))
        checked(Anything, f'{{"items":[{many}]}}'.encode())
        with pytest.raises(RequestValidationError, match="more than 262,144 values"):
            checked(Anything, f'{{"items":[{many},{many},{many}]}}'.encode())


def test_a_long_text_may_have_many_commas():
    text = 'a, "b", [c], {d}\n' * 40_000
    content = checked(DocumentRequest, json.dumps({"name": "table", "text": text}).encode())
    assert isinstance(content, DocumentRequest)
    assert content.text == text


def test_large_bodies_are_checked_beside_the_event_loop(app, monkeypatch):
    threads: list[str] = []

    def noting(*about) -> BaseModel:
        threads.append(threading.current_thread().name)
        return checked(*about)

    monkeypatch.setattr(bodies, "checked", noting)
    client = client_of(app)
    for size in (10, 100_000):
        assert client.post("/v1/completions", json={"prompt": "ka1 " * size, "n": 0}).status_code == 400
    assert threads[0] != threads[1]
    assert threads[1].startswith("AnyIO worker")
