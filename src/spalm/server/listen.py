"""Listening on a port of this machine until the server is stopped."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from spalm.console import console, say
from spalm.errors import InputError
from spalm.server.queue import RequestQueue

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_SECONDS = 5
"""Seconds that the current request may still take when the server is stopped."""


def allowed_hosts(host: str) -> list[str]:
    """Returns the host names by which a server that listens on `host` may be reached."""
    return ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else ["*"]


def serve(app: FastAPI, host: str, port: int, title: str) -> None:
    """Serves until stopped by Ctrl-C or SIGTERM; port 0 means any free port.

    When the server is stopped, the current request is ended and waiting ones are refused. `title` is the name of the
    server in the line that is printed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"--host {host} --port {port}: {error.strerror or error}; give another one") from None
        listener.listen()
        shown = f"[{host}]" if ":" in host else host
        if host not in LOOPBACK:
            say(f"anyone who can reach {host} can now read the texts of this run")
        say(f"{title} is at http://{shown}:{listener.getsockname()[1]}/ ; stop it with Ctrl-C")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS)
        with _quiet_shutdown():
            _Server(config, app.state.queue).run(sockets=[listener])
        app.state.queue.stop()


class _Server(uvicorn.Server):
    """A server that closes its queue when it gets the signal to exit."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue):
        super().__init__(config)
        self._queue = queue

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._queue.close()
        super().handle_exit(sig, frame)


@contextmanager
def _quiet_shutdown() -> Iterator[None]:
    """Ignores the signal that uvicorn raises again when it has stopped, and prints no progress while it serves.

    Stopping the server is no error, and progress bars of every added document would only be noise.
    """
    mine = threading.current_thread() is threading.main_thread()
    before = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGINT, signal.SIGTERM) if mine}
    quiet, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = quiet
        for sig, handler in before.items():
            signal.signal(sig, handler)
