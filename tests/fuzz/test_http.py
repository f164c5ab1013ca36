"""Hostile requests to a server: every one gets an answer below 500, and the server lives on without a traceback."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from spalm.server import Limits
from support.fuzzing import Tally
from support.hostile_http import bodies, exchange, raw_request
from support.servers import TEMPLATE, copied, in_thread, open_attached, server_of

PARTS = 4
SECONDS = 30.0
"""Seconds that an answer may take."""
LIMITS = Limits(max_tokens=4, answers=4, body_bytes=1 << 16)


class Log(logging.Handler):
    """Keeps what a server logs of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def logged(tally: Tally) -> Iterator[None]:
    """Notes the tracebacks that a server logs."""
    log, logger = Log(), logging.getLogger("uvicorn.error")
    logger.addHandler(log)
    try:
        yield
    finally:
        logger.removeHandler(log)
        for line in log.lines:
            tally.note("tracebacks", line[-2000:])


@pytest.fixture(scope="module")
def address(attached_folder, tmp_path_factory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("http")
    app = server_of(open_attached(copied(attached_folder, folder / "tiny", TEMPLATE)), limits=LIMITS)
    with in_thread(app) as found:
        yield found


def check(tally: Tally, status: int, what: str) -> None:
    """Notes a status that blames the server; 503 says that it is busy."""
    if status >= 500 and status != 503:
        tally.note("errors_500", f"{status}: {what}")


def test_bodies_with_hostile_fields(address, random: np.random.Generator, amount, tally: Tally):
    every = list(bodies())
    with logged(tally), httpx.Client(base_url=address, timeout=SECONDS) as client:
        for number in random.choice(len(every), amount(60, 300), replace=False).tolist():
            path, body = every[number]
            what = f"{path} {body[:500]!r}"
            with tally.trying(what):
                try:
                    found = client.post(path, content=body, headers={"Content-Type": "application/json"})
                    check(tally, found.status_code, what)
                except httpx.TimeoutException:
                    tally.note("hangs", what)
        assert client.get("/health").json()["status"] == "ok"


def test_bytes_that_are_hardly_http(address, random: np.random.Generator, amount, tally: Tally):
    parts = urlsplit(address)
    with logged(tally):
        for _ in range(amount(80, 150)):
            request = raw_request(random)
            what = repr(request[:500])
            with tally.trying(what):
                try:
                    answer = exchange((str(parts.hostname), int(parts.port or 0)), request, SECONDS)
                except TimeoutError:
                    tally.note("hangs", what)
                    continue
                if answer and not answer.startswith(b"HTTP/1.1 "):
                    tally.note("other", f"{what}: {answer[:100]!r}")
                elif answer:
                    check(tally, int(answer[9:12]), what)
        assert httpx.get(f"{address}/health", timeout=SECONDS).json()["status"] == "ok"
