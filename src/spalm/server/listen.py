"""A web application on a port of this machine."""

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

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PATIENCE = 5
"""Seconds that the request at hand has when the server is stopped."""


def allowed_hosts(host: str) -> list[str]:
    """Names by which a server that listens on `host` may be called."""
    return ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else ["*"]


def serve(app: FastAPI, host: str, port: int, what: str) -> None:
    """Serves until it is stopped, from the keyboard or by SIGTERM: then the request at hand is ended, and those in line
    are refused. Port 0: any that is free."""
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
        say(f"{what} is at http://{shown}:{listener.getsockname()[1]}/ ; stop it with Ctrl-C")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_PATIENCE)
        with _in_peace():
            _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.desk.close()
        super().handle_exit(sig, frame)


@contextmanager
def _in_peace() -> Iterator[None]:
    """To be stopped is no error: uvicorn raises the signal once more when it is done, and nobody is to hear it then.
    Nor does the console tell of every document."""
    mine = threading.current_thread() is threading.main_thread()
    before = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGINT, signal.SIGTERM) if mine}
    quiet, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = quiet
        for sig, handler in before.items():
            signal.signal(sig, handler)
