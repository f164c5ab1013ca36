"""Workers of Ray that are forks of a process that has loaded the libraries: a new Python would spend seconds on that.

A node whose `setup_worker_path` is this file runs it in place of Ray's own to start a worker. It asks the process of
the tests for a fork, which then is the worker.
"""

import json
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOCKET = "RAY_WORKERS_SOCKET"
"""Variable with the address at which forks are asked for."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Forks workers for the nodes that are started in the meantime; they find the address in their environment."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.environ[_SOCKET] = str(Path(folder, "socket"))
        listener.bind(os.environ[_SOCKET])
        listener.listen()
        threading.Thread(target=_fork_when_asked, args=[listener], daemon=True).start()
        yield
        del os.environ[_SOCKET]
        listener.shutdown(socket.SHUT_RDWR)


def _fork_when_asked(listener: socket.socket) -> None:
    """Forks a worker for each connection, until the listener is shut down."""
    from support.commands import Fork

    forks = []
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile() as file:
            forks.append(Fork(_work, file.read()))


def _work(arguments: list[str]) -> None:
    """Is a worker, as Ray's own file for that is, in the environment in which Ray started it."""
    asked = json.loads(arguments[0])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _ask(arguments: list[str]) -> None:
    """Asks for a worker with the arguments that Ray's own setup of a worker passes on."""
    kept = [each for each in arguments if not each.startswith(("--serialized-runtime-env-context", "--language"))]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_SOCKET])
        connection.sendall(json.dumps({"arguments": kept, "environment": dict(os.environ)}).encode())


if __name__ == "__main__":
    _ask(sys.argv[1:])
