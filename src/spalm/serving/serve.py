"""A web application on a port of this machine."""

import socket

import uvicorn
from fastapi import FastAPI

from spalm.console import say
from spalm.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def allowed_hosts(host: str) -> list[str]:
    """Names by which a server that listens on `host` may be called."""
    return ["127.0.0.1", "localhost", "[::1]"] if host in LOOPBACK else ["*"]


def serve(app: FastAPI, host: str, port: int, what: str) -> None:
    """Serves until it is stopped from the keyboard. Port 0: any that is free."""
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
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])
