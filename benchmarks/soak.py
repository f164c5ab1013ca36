"""A server under many clients at once, some of them slow or broken: nothing is lost, nothing grows without bound.

    soak.json    numbers of requests by kind and status; memory and open files of the server in each quarter of the
                 time; what was lost, resurrected or answered wrongly (nothing)

`make soak` serves a tiny model with random weights in a process of its own for ten minutes (ARGS="--minutes 1").
Most clients add and delete documents of their own, ask and list; each notes what was acknowledged, and the documents
must be the same in the end: in the server's list, on disk, and in a server that is started again.
"""

import argparse
import contextlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from spalm.attachment import AttachSettings
from spalm.compute import Execution, Hardware
from spalm.console import print_json, say
from spalm.files import write_json
from spalm.memory import Memory

PATIENCE = 60.0
"""Seconds that a client waits for an answer."""
CLIENTS, SLOW, BROKEN = 32, 4, 4
"""Number of clients, and how many of them are slow and broken."""
DOCUMENTS = "/memory/documents"
BROKEN_NAME = "broken client"
"""Beginning of the names of documents whose clients do not wait: they may be there or not."""
_GROWTH, _MORE_BYTES = 1.25, 64 << 20
"""Memory is bounded if the last quarter has at most so many times that of the second one, and so much more."""
_MOST_FILES = 512
"""Open files are bounded if there are at most so many: connections, and mapped files of the memory."""


class Client(threading.Thread):
    """Adds, deletes and asks at random, and notes what was acknowledged. It changes documents of its own only."""

    def __init__(self, number: int, address: str, until: float, most: int = 1_000_000):
        """`until` is the time of its end; `most` is the number of documents that it keeps."""
        super().__init__(daemon=True)
        self.number, self.address, self.until, self.most = number, address, until, most
        self.held: dict[str, int] = {}
        self.gone: set[str] = set()
        self.unsure: set[str] = set()
        """Names of documents that were being changed when the server died: the change was made or not."""
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        """Acts until its end."""
        chance = random.Random(self.number)
        with httpx.Client(base_url=self.address, timeout=PATIENCE) as client:
            for turn in range(1_000_000_000):
                if time.monotonic() > self.until:
                    return
                name = f"client {self.number}/../{turn}"
                try:
                    self._act(client, chance, name)
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return

    def _act(self, client: httpx.Client, chance: random.Random, name: str) -> None:
        match chance.choice(["add", "add", "delete", "complete", "stream", "list", "explain"]):
            case "add" if len(self.held) < self.most:
                self._add_document(client, chance, name)
            case "add" | "delete" if self.held:
                self._delete_document(client, chance.choice(sorted(self.held)))
            case "complete" | "stream" as what:
                asked = {"prompt": "ka1 lo2", "max_tokens": chance.randrange(1, 6), "stream": what == "stream"}
                found = client.post("/v1/completions", json=asked)
                self._note(what, found, 200)
                if what == "stream" and found.status_code == 200 and not found.text.endswith("data: [DONE]\n\n"):
                    self.wrong.append(found.text)
            case "list":
                found = client.get(DOCUMENTS, params={"containing": f"client {self.number}/"})
                self._note("list", found, 200, may_be_refused=False)
                if {each["name"]: each["entries"] for each in found.json()["documents"]} != self.held:
                    self.wrong.append(f"{found.json()} instead of {self.held}")
            case "explain":
                self._note("explain", client.post("/explain", json={"text": "ka1 lo2", "position": 1}), 200)

    def _add_document(self, client: httpx.Client, chance: random.Random, name: str) -> None:
        self.unsure.add(name)
        words = " ".join(f"ka{chance.randrange(30)}" for _ in range(chance.randrange(1, 40)))
        found = client.post(DOCUMENTS, json={"name": name, "text": words})
        self._note("add", found, 201)
        if found.status_code == 201:
            self.held[name] = found.json()["entries"]
        self.unsure.discard(name)

    def _delete_document(self, client: httpx.Client, name: str) -> None:
        self.unsure.add(name)
        found = client.delete(DOCUMENTS, params={"name": name})
        self._note("delete", found, 200)
        if found.status_code == 200:
            del self.held[name]
            self.gone.add(name)
        self.unsure.discard(name)

    def _note(self, what: str, found: httpx.Response, right: int, *, may_be_refused: bool = True) -> None:
        self.statuses[what, found.status_code] += 1
        if found.status_code != right and not (may_be_refused and found.status_code == 429):
            self.wrong.append(f"{what}: {found.status_code} {found.text}")


class HostileClient(threading.Thread):
    """A client that behaves badly again and again; the server must only go on."""

    def __init__(self, number: int, address: str, until: float):
        super().__init__(daemon=True)
        self.address, self.until, self.chance = address, until, random.Random(number)
        self.count = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        """Acts until its end."""
        while time.monotonic() < self.until:
            with contextlib.suppress(OSError, httpx.HTTPError):
                self.act()
            self.count += 1

    def act(self) -> None:
        """Does one bad thing."""
        raise NotImplementedError

    def connect(self) -> socket.socket:
        """Returns a new connection."""
        host, port = self.address.removeprefix("http://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), PATIENCE)


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


class SlowClient(HostileClient):
    """Holds ten half-sent requests, byte by byte, for a while."""

    def act(self) -> None:
        """Sends half of ten requests, and then a byte now and then."""
        clients = [self.connect() for _ in range(10)]
        for each in clients:
            each.sendall(self.chance.choice([b"", _HEAD, _HEAD + b"Content-Length: 500\r\n\r\n{"]))
        end = min(self.until, time.monotonic() + self.chance.uniform(0.5, 15))
        while clients and time.monotonic() < end:
            time.sleep(0.2)
            for each in list(clients):
                try:
                    each.sendall(b"x")
                except OSError:  # the server has ended it
                    clients.remove(each)
        for each in clients:
            each.close()


class BrokenClient(HostileClient):
    """Sends nonsense, too much, or what it does not wait for."""

    def act(self) -> None:
        """Sends one wrong request, or leaves in the middle of a right one."""
        what = self.chance.choice(["nonsense", "leave", "add and leave", "request"])
        if what == "request":
            self._refused_request()
            return
        with self.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
            if what == "nonsense":
                client.sendall(self.chance.randbytes(200) + b"\r\n\r\n")
            elif what == "leave":
                client.sendall(_request("/v1/completions", b'{"prompt":"ka1","max_tokens":60,"stream":true}'))
                client.recv(self.chance.choice([1, 400]))
            else:
                name = f"{BROKEN_NAME} {self.chance.random()}"
                client.sendall(_request(DOCUMENTS, b'{"name":"%s","text":"%s"}' % (name.encode(), b"ka1 lo2 " * 50)))
                time.sleep(self.chance.uniform(0, 0.1))
        if what == "add and leave":
            httpx.delete(f"{self.address}{DOCUMENTS}", params={"name": name}, timeout=PATIENCE)

    def _refused_request(self) -> None:
        kind = {"Content-Type": "application/json"}
        body, headers = self.chance.choice(
            [
                (b"{", kind),
                (b'{"prompt":[' + b"{}," * 250_000 + b"{}]}", kind),
                (b'{"prompt":"%s"}' % (b"x" * (9 << 20)), kind),
                (b'{"prompt":"a","n":%s}' % (b"9" * 4299), kind),
                (b'{"prompt":"a"}', {}),
                (b'{"prompt":"a"}', {**kind, "Origin": "http://evil.example"}),
            ]
        )
        found = httpx.post(f"{self.address}/v1/completions", content=body, headers=headers, timeout=PATIENCE)
        if not 400 <= found.status_code < 500:
            self.wrong.append(f"{body[:60]!r}: {found.status_code} {found.text[:200]}")


def _request(path: str, body: bytes) -> bytes:
    head = _HEAD.replace(b"/v1/completions", path.encode())
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    bytes: int
    """Memory of its own, without files that are mapped."""
    files: int
    sockets: int
    """Number of the open files that are sockets."""

    @classmethod
    def of(cls, pid: int) -> "Usage":
        """Returns what a process uses at present."""
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
        files = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has been closed
                files.append(str(path.readlink()))
        return cls(int(anonymous.split()[1]) << 10, len(files), sum(each.startswith("socket:") for each in files))


class Watch(threading.Thread):
    """Notes what a process uses, again and again."""

    def __init__(self, pid: int, until: float, seconds: float):
        super().__init__(daemon=True)
        self._pid, self._until, self._seconds = pid, until, seconds
        self.seen: list[Usage] = []

    def run(self) -> None:
        """Notes until its end."""
        while time.monotonic() < self._until:
            with contextlib.suppress(OSError, StopIteration):
                self.seen.append(Usage.of(self._pid))
            time.sleep(self._seconds)

    def quarters(self) -> list[Usage]:
        """Returns the most that was used in each quarter of the time."""
        size = max(1, len(self.seen) // 4)
        parts = [self.seen[start : start + size] for start in range(0, 4 * size, size)]
        return [_most(part) for part in parts if part]


def _most(seen: list[Usage]) -> Usage:
    numbers = [(each.bytes, each.files, each.sockets) for each in seen]
    return Usage(*map(max, zip(*numbers)))


def sockets_left(pid: int, before: Usage) -> int:
    """Returns how many sockets a server has more than `before`, as soon as it is none; at the latest after a while."""
    deadline = time.monotonic() + PATIENCE
    while (left := Usage.of(pid).sockets - before.sockets) > 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    return max(0, left)


def texts_held(folder: Path) -> dict[str, int]:
    """Returns documents and their entries as they are on disk, checked byte by byte."""
    memory = Memory(folder / "memory")
    memory.verify()
    entries = memory.entries()
    assert len(entries.tokens(0, len(entries))) == len(entries.keys(0, len(entries))) == len(entries)
    held = entries.live_documents
    assert int(held.entries.sum()) == len(entries)
    assert len(set(held.names)) == len(held)
    return dict(zip(held.names, held.entries.tolist()))


def listed(address: str) -> dict[str, int]:
    """Returns the documents that a server lists, but for those of broken clients."""
    found = httpx.get(f"{address}{DOCUMENTS}", timeout=PATIENCE).json()["documents"]
    return {each["name"]: each["entries"] for each in found if not each["name"].startswith(BROKEN_NAME)}


def soak(address: str, pid: int, seconds: float, most: int = 8) -> tuple[dict[str, int], dict[str, Any]]:
    """Lets clients at a server; returns the documents that it must hold in the end, and figures.

    `pid` is the server's process; `most` is the number of documents that a client keeps.
    """
    expected, until = listed(address), time.monotonic() + seconds
    before, watch = Usage.of(pid), Watch(pid, until, min(1.0, seconds / 20))
    clients = [Client(number, address, until, most) for number in range(CLIENTS - SLOW - BROKEN)]
    hostile = [SlowClient(number, address, until) for number in range(SLOW)]
    hostile += [BrokenClient(number, address, until) for number in range(BROKEN)]
    everybody = [watch, *clients, *hostile]
    for each in everybody:
        each.start()
    for each in everybody:
        each.join(seconds + 2 * PATIENCE)
    for client in clients:
        expected |= client.held
    found = listed(address)
    counts = sum((client.statuses for client in clients), Counter())
    quarters = watch.quarters()
    figures = {
        "seconds": seconds,
        "clients": {"ordinary": len(clients), "slow": SLOW, "broken": BROKEN},
        "requests": {f"{what} {status}": count for (what, status), count in sorted(counts.items())},
        "acts_of_hostile_clients": sum(each.count for each in hostile),
        "bytes": {"before": before.bytes, "quarters": [each.bytes for each in quarters]},
        "files": {"before": before.files, "quarters": [each.files for each in quarters]},
        "sockets": {"quarters": [each.sockets for each in quarters], "left": sockets_left(pid, before)},
        "bounded": is_bounded(quarters),
        "lost": len(expected.keys() - found.keys()),
        "resurrected": len(found.keys() - expected.keys()),
        "wrong": [wrong for client in [*clients, *hostile] for wrong in client.wrong][:20],
        "health": httpx.get(f"{address}/health", timeout=PATIENCE).json()["status"],
    }
    return expected, figures


def is_bounded(quarters: list[Usage]) -> bool:
    """Returns whether memory does not grow from the second quarter on, and files are never too many."""
    second, last = quarters[min(1, len(quarters) - 1)], quarters[-1]
    files = max(each.files for each in quarters)
    return last.bytes <= _GROWTH * second.bytes + _MORE_BYTES and files <= _MOST_FILES


def make_model(folder: Path) -> Path:
    """Makes a tiny pretrained model with a memory; its weights are random."""
    from spalm.api import attach_and_export
    from support.facts import write_documents
    from support.tiny_models import write_model

    texts = folder / "texts"
    texts.mkdir(parents=True)
    write_documents(texts)
    write_model(folder / "model", "llama", "".join(path.read_text() for path in sorted(texts.iterdir())))
    settings = AttachSettings(context=64, stride=48, neighbours=32, positions=4000)
    attach_and_export(
        str(folder / "model"), [texts], folder / "tiny", settings=settings, execution=Execution(Hardware("cpu", 1))
    )
    return folder / "tiny"


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Starts a server; gives its process and address, and stops it as Ctrl-C does."""
    command = [sys.executable, "-m", "spalm", "serve", str(folder), "--port", "0", "--threads", "1"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield process, _address(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
            log.seek(0)
            if "Traceback" in (said := log.read()):
                say(said)


def _address(process: subprocess.Popen, log: Any) -> str:
    while True:
        log.seek(0)
        if "http://" in (said := log.read()):
            return "http://" + said.split("http://")[1].split("/")[0]
        assert process.poll() is None, said
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/soak.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", type=Path, help="what `spalm attach` made; a copy of it is served")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "served")
        shutil.copytree(given.model or make_model(Path(scratch, "made")), folder)
        with served(folder) as (process, address):
            say(f"{CLIENTS} clients for {given.minutes:g} minutes")
            expected, figures = soak(address, process.pid, given.minutes * 60)
        on_disk = {name: count for name, count in texts_held(folder).items() if not name.startswith(BROKEN_NAME)}
        with served(folder) as (_, address):
            figures |= {"same_on_disk": on_disk == expected, "same_after_restart": listed(address) == expected}
    good = figures["bounded"] and figures["same_on_disk"] and figures["same_after_restart"] and not figures["wrong"]
    good = good and not figures["sockets"]["left"]
    figures["passed"] = bool(good and not figures["lost"] and not figures["resurrected"])
    write_json(given.out, figures)
    print_json(figures)
    sys.exit(not figures["passed"])


if __name__ == "__main__":
    main()
