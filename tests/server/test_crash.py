"""Many clients, kills and stops: nothing that was acknowledged is lost, and nothing that was deleted comes back."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter

import httpx
import pytest

from soak import Client, soak, texts_held
from spalm.server import Limits
from support.servers import (
    PATIENCE,
    Held,
    HeldEncoder,
    copied,
    hang_up,
    in_process,
    in_thread,
    open_attached,
    server_of,
    stop,
    wait_until,
)

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("SPALM_STRESS_SECONDS", "5"))
ROUNDS = 6
"""Number of times that clients come; on a busy machine the first may all be refused."""
CLIENTS = 32
DOCUMENTS = "/memory/documents"


def test_many_clients_at_once(attached_folder, tmp_path, capsys):
    folder = copied(attached_folder, tmp_path / "tiny")
    before = texts_held(folder)
    with in_thread(server_of(open_attached(folder), limits=Limits(waiting=12))) as address:
        clients: list[Client] = []
        for _ in range(ROUNDS):
            until = time.monotonic() + SECONDS
            started = [Client(len(clients) + number, address, until) for number in range(CLIENTS)]
            for client in started:
                client.start()
            for client in started:
                client.join(SECONDS + PATIENCE)
            clients += started
            counts = sum((client.statuses for client in clients), Counter())
            if counts["add", 201] and counts["complete", 200]:
                break
        listed = httpx.get(f"{address}{DOCUMENTS}").json()["documents"]
        assert httpx.get(f"{address}/health").json()["status"] == "ok"
    assert [wrong for client in clients for wrong in client.wrong] == []
    expected = before | {name: entries for client in clients for name, entries in client.held.items()}
    assert {each["name"]: each["entries"] for each in listed} == expected
    assert texts_held(folder) == expected
    assert counts["add", 201] > 0
    assert counts["complete", 200] > 0
    assert sum(count for (_, status), count in counts.items() if status == 429) > 0
    with in_thread(server_of(open_attached(folder))) as address:  # and after it was started again
        again = httpx.get(f"{address}{DOCUMENTS}").json()["documents"]
    assert again == listed
    with capsys.disabled():
        if SECONDS > 10:
            print(f"\n{counts.total():,} requests in {SECONDS:.0f} s:", dict(sorted(counts.items())))


def test_a_kill_loses_nothing_that_was_acknowledged(attached_folder, tmp_path):
    folder = copied(attached_folder, tmp_path / "tiny")
    before = texts_held(folder)
    with in_process(folder) as (process, address):
        clients = [Client(number, address, time.monotonic() + PATIENCE) for number in range(4)]
        for client in clients:
            client.start()
        enough = random.randrange(3, 12)
        wait_until(lambda: sum(len(client.held) for client in clients) >= enough)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        for client in clients:
            client.join(PATIENCE)
    held = {name: entries for client in clients for name, entries in client.held.items()}
    gone = {name for client in clients for name in client.gone}
    unsure = {name for client in clients for name in client.unsure}
    app = server_of(open_attached(folder))
    found = texts_held(folder)
    assert {name: entries for name, entries in found.items() if name not in unsure} == {
        name: entries for name, entries in (before | held).items() if name not in unsure
    }
    assert not gone & set(found)
    with in_thread(app) as address:
        added = httpx.post(f"{address}{DOCUMENTS}", json={"name": "after", "text": "ka1 lo2"}, timeout=PATIENCE)
        assert added.status_code == 201
    assert texts_held(folder) == found | {"after": added.json()["entries"]}


def test_a_short_soak(attached_folder, tmp_path):
    """`make soak` in small: slow and broken clients among the others."""
    folder = copied(attached_folder, tmp_path / "tiny")
    before = texts_held(folder)
    with in_process(folder) as (process, address):
        expected, figures = soak(address, process.pid, SECONDS, most=3)
        assert "Traceback" not in process.errors()
    assert figures["wrong"] == []
    assert (figures["lost"], figures["resurrected"], figures["health"]) == (0, 0, "ok")
    assert figures["acts_of_hostile_clients"] > 0
    assert figures["bounded"]
    assert figures["sockets"]["left"] == 0
    assert before.items() <= expected.items()
    assert {name: count for name, count in texts_held(folder).items() if name in expected} == expected


def test_a_document_whose_client_left_is_not_finished(attached_folder, tmp_path):
    """Nor is it in the way of the next."""
    folder = copied(attached_folder, tmp_path / "tiny")
    held = HeldEncoder()
    app = server_of(open_attached(folder), held)
    with in_thread(app) as address:
        leaving = httpx.Client(base_url=address, timeout=PATIENCE)
        asking = threading.Thread(target=leave, args=(leaving, {"name": "left", "text": "ka1 lo2 " * 100}))
        asking.start()
        wait_until(held.begun.is_set)
        hang_up(leaving)
        wait_until(lambda: app.state.queue.departed == 1)
        held.let_go.set()
        wait_until(lambda: app.state.queue.size == 0)
        asking.join(PATIENCE)
        added = httpx.post(f"{address}{DOCUMENTS}", json={"name": "next", "text": "ka1"}, timeout=PATIENCE)
        assert added.status_code == 201
    found = texts_held(folder)
    assert "next" in found
    assert "left" not in found


def leave(client: httpx.Client, document: dict[str, str]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        client.post(DOCUMENTS, json=document)


def test_a_stop_waits_for_the_work_at_hand(attached_folder):
    with in_process(attached_folder) as (process, address):
        asked = {"prompt": "ka1", "max_tokens": 100, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in process.errors()


def test_a_stop_does_not_wait_for_ever(attached_folder):
    """What takes too long is ended as it should be, and those in line are refused."""
    held = Held()
    app = server_of(open_attached(attached_folder), held)
    asked = {"prompt": "ka1", "max_tokens": 50, "stream": True, "temperature": 0}
    statuses: list[int] = []
    with in_thread(app, patience=1) as address:
        path = f"{address}/v1/completions"
        waiting = threading.Thread(
            target=lambda: statuses.append(httpx.post(path, json=asked, timeout=PATIENCE).status_code)
        )
        held.let_go(1)
        with httpx.stream("POST", path, json=asked, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            waiting.start()
            wait_until(lambda: app.state.queue.size == 2)
            stop(app)
            rest = [line for line in lines if line]
        held.let_go()
        waiting.join(PATIENCE)
    assert "the server is being stopped" in rest[-1]
    assert statuses == [503]
