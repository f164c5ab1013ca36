"""Connections: slow clients make room for others, and the log does not grow."""

import logging
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from fastapi import FastAPI, Response

from spalm.server import Limits
from spalm.server.http.log import BoundedLogHandler, bounded_log
from spalm.server.queue import RequestQueue
from support.servers import in_process, in_thread, wait_until

HALF_HEADERS = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 30)


def is_ended(client: socket.socket) -> bool:
    """Whether the server has ended a connection."""
    client.settimeout(0.01)
    try:
        return client.recv(1000) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def light_app(limits: Limits) -> FastAPI:
    app = FastAPI()
    app.state.limits, app.state.queue = limits, RequestQueue(1)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * (32 << 20))

    return app


@pytest.mark.slow
def test_half_sent_requests_do_not_stop_a_server_with_few_files(attached_folder):
    """300 of them where 256 files may be open."""
    with in_process(attached_folder, files=256) as (process, address), ExitStack() as held:
        for number in range(300):
            client = held.enter_context(connect(address))
            client.sendall(HALF_HEADERS if number % 2 else HALF_BODY)
        for _ in range(5):
            assert httpx.get(f"{address}/health", timeout=30).json()["status"] == "ok"
        asked = {"prompt": "ka1", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=asked, timeout=30).status_code == 200
        for _ in range(100):  # no HTTP at all
            with connect(address) as client:
                client.sendall(b"\x1b]0;nonsense\x07\r\n\r\n")
        assert httpx.get(f"{address}/health", timeout=30).json()["status"] == "ok"
        assert len(process.errors()) < 20_000
        assert "Traceback" not in process.errors()
        assert "\x1b" not in process.errors()


def test_headers_that_do_not_come_are_not_waited_for():
    with (
        in_thread(light_app(Limits(header_seconds=0.5))) as address,
        connect(address) as silent,
        connect(address) as slow,
    ):
        slow.sendall(HALF_HEADERS)
        begun, ended = time.monotonic(), set()
        while len(ended) < 2 and time.monotonic() - begun < 20:  # one byte now and then does not help
            ended |= {each for each in (silent, slow) if is_ended(each)}
            if slow not in ended:
                try:
                    slow.sendall(b"x")
                except OSError:
                    ended.add(slow)
            time.sleep(0.05)
        assert len(ended) == 2
        with httpx.Client(base_url=address) as client:
            assert [client.get("/health").json() for _ in range(3)] == ["ok"] * 3


def test_who_has_waited_longest_makes_room():
    with in_thread(light_app(Limits(connections=3))) as address, ExitStack() as held:
        clients = []
        for _ in range(3):
            clients.append(held.enter_context(connect(address)))
            clients[-1].sendall(HALF_HEADERS)
            time.sleep(0.05)
        assert httpx.get(f"{address}/health").json() == "ok"
        wait_until(lambda: is_ended(clients[0]))
        assert not is_ended(clients[2])


def test_an_answer_that_is_not_read_is_not_kept():
    app = light_app(Limits(body_seconds=0.5))
    with in_thread(app) as address, connect(address) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        connections = app.state.server.server_state.connections
        wait_until(lambda: len(connections) == 1)
        wait_until(lambda: len(connections) == 0)


def test_the_log_is_bounded_and_plain(capsys):
    with bounded_log():
        for number in range(1000):
            logging.getLogger("uvicorn.error").warning("\x1b[31mred %d %s", number, "x" * 100_000)
        logging.getLogger("uvicorn.access").info("not shown")
    said = capsys.readouterr().err
    assert "\\u001b[31mred 0" in said
    assert "\x1b" not in said
    assert len(said) < 600_000
    handler = BoundedLogHandler()
    for _ in range(100):
        handler.emit(logging.makeLogRecord({"msg": "again", "levelname": "WARNING"}))
    handler._began -= 100
    handler.emit(logging.makeLogRecord({"msg": "later", "levelname": "WARNING"}))
    assert "40 further messages were left out\nWARNING: later" in capsys.readouterr().err
