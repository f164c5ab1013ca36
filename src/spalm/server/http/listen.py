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
from spalm.openmp import end_idle_threads
from spalm.server.http.connections import BACKLOG, BoundedConfig, end_overdue
from spalm.server.http.hosts import address_of, is_loopback, plain_host
from spalm.server.http.log import bounded_log
from spalm.server.queue import RequestQueue

_SHUTDOWN_SECONDS = 5
"""Seconds that the current request may still take when the server is stopped."""
_TICKS = 10
"""Number of uvicorn's ticks, of a tenth of a second, after which connections are looked at."""


def check_access(host: str, *, key: bool, no_key: bool) -> None:
    """Refuses to let other machines in without a key, unless that is wanted.

    `key` says whether there is one, `no_key` whether none is wanted.
    """
    if not (is_loopback(host) or key or no_key):
        raise InputError(
            f"--host {host}: other machines could use the server; set a key (serve --key), or say --no-key"
        )


def serve(app: FastAPI, host: str, port: int, *, title: str, no_key: bool = False) -> None:
    """Serves until stopped by Ctrl-C or SIGTERM; port 0 means any free port.

    When the server is stopped, the current request is ended and waiting ones are refused. `title` is the name of the
    server in the line that is printed. `no_key` allows other machines to use a server that needs no key.
    """
    check_access(host, key=app.state.has_key, no_key=no_key)
    host = plain_host(host)
    family, address = address_of(host, port)
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise InputError(f"--host {host} --port {port}: {error.strerror or error}; give another one") from None
        listener.listen(BACKLOG)
        shown = f"[{host}]" if ":" in host else host
        if not (is_loopback(host) or app.state.has_key):
            say(f"anyone who can reach {host} can now read the texts of this run")
        say(f"{title} is at http://{shown}:{listener.getsockname()[1]}/ ; stop it with Ctrl-C")
        end_idle_threads()  # the model works in a thread of its own from now on
        with _quiet_shutdown(), bounded_log():
            BoundedServer(app).run(sockets=[listener])
        app.state.queue.stop()


class BoundedServer(uvicorn.Server):
    """A server that ends overdue connections, and that closes its queue when it gets the signal to exit."""

    def __init__(self, app: FastAPI, shutdown_seconds: int = _SHUTDOWN_SECONDS):
        super().__init__(BoundedConfig(app, app.state.limits, shutdown_seconds))
        self._queue: RequestQueue = app.state.queue

    async def on_tick(self, counter: int) -> bool:
        """Does what is due now and then; returns whether to exit."""
        if counter % _TICKS == 0:
            end_overdue(self.server_state.connections)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Closes the queue and begins to exit."""
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
