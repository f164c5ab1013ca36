"""Workers of Ray that are forks of a process that has loaded the libraries: a new Python would spend seconds on that.

A node whose `setup_worker_path` is this file runs it in place of Ray's own to start a worker. It asks that process for
a fork, which then is the worker.
"""

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOCKET = "RAY_WORKERS_SOCKET"
"""Variable with the address at which forks are asked for."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Forks workers for the nodes that are started in the meantime; they find the address in their environment."""
    from support.commands import Fork

    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "socket")
        process = Fork(_fork_when_asked, address)  # no thread: the one that connects to Ray would stop it
        os.environ[_SOCKET] = str(address)
        try:
            while not address.exists():
                assert process.poll() is None, process.errors()
                time.sleep(0.02)
            yield
        finally:
            del os.environ[_SOCKET]
            process.kill()


def _fork_when_asked(arguments: list[str]) -> None:
    """Forks a worker for each connection to an address."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{arguments[0]}.new")
        listener.listen()
        Path(f"{arguments[0]}.new").rename(arguments[0])
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile() as file:
                asked = json.load(file)
            if not os.fork():
                listener.close()
                _work(**asked)


def _work(arguments: list[str], environment: dict[str, str]) -> None:
    """Is a worker, as Ray's own file for that is, in the environment in which Ray started it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        os._exit(0)


def _ask(arguments: list[str]) -> None:
    """Asks for a worker with the arguments that Ray's own setup of a worker passes on."""
    kept = [each for each in arguments if not each.startswith(("--serialized-runtime-env-context", "--language"))]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_SOCKET])
        connection.sendall(json.dumps({"arguments": kept, "environment": dict(os.environ)}).encode())


if __name__ == "__main__":
    _ask(sys.argv[1:])
