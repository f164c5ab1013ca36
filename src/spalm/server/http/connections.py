"""Connections: how many may be open, and how long a client may keep one without saying what it wants."""

import asyncio
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from spalm.files import most_open_files
from spalm.server.limits import Limits

BACKLOG = 32
"""Number of connections that may wait to be accepted, and that are accepted at a time."""
_FEWEST = 8
"""Number of connections that there may be in any case."""
_HEADER_BYTES = 1 << 15
"""Highest number of bytes of headers that arrive in pieces."""
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedConfig(uvicorn.Config):
    """A configuration of uvicorn whose connections are bounded, and which logs through the loggers as they are."""

    def __init__(self, app: ASGIApp, limits: Limits, shutdown_seconds: int):
        super().__init__(
            app,  # type: ignore[arg-type]
            http=BoundedConnection,
            ws="none",
            backlog=BACKLOG,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=shutdown_seconds,
        )
        self.limits, self.most_connections = limits, _most_connections(limits)


class BoundedConnection(H11Protocol):
    """A connection that ends if its client does not go on.

    When there are too many, the one whose client has kept the server waiting longest makes room. (uvicorn's own limit
    would refuse everybody while some clients hold half-sent requests.)
    """

    config: BoundedConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Notes the new connection, and makes room for it."""
        super().connection_made(transport)
        self._since, self._ended = self.loop.time(), False
        others = [each for each in self.connections if isinstance(each, BoundedConnection) and not each._ended]
        if len(others) <= self.config.most_connections:
            return
        idle = [each for each in others if each is not self and each._waits_for_client]
        if idle:
            min(idle, key=lambda each: each._since).end()
        else:
            self._ended = True
            transport.write(_BUSY)
            transport.close()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def _waits_for_client(self) -> bool:
        """Whether the client has something to do: to send the rest of a request, or to read the rest of an answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def end_if_overdue(self) -> None:
        """Ends the connection if the headers of a request, or the reading of an answer, have taken too long.

        The time for bodies is kept where they are read.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            return
        limits, unread = self.config.limits, self.transport.get_write_buffer_size()
        if self.loop.time() - self._since > (limits.body_seconds if unread else limits.header_seconds):
            self.end()

    def end(self) -> None:
        """Ends the connection at once."""
        self._ended = True
        self.transport.abort()


def end_overdue(connections: Iterable) -> None:
    """Ends all connections that have kept the server waiting too long."""
    for each in list(connections):
        if isinstance(each, BoundedConnection):
            each.end_if_overdue()


def _most_connections(limits: Limits) -> int:
    """Returns how many connections may be open: a quarter of the open files that the system allows, at most.

    The rest is for the memory, and for connections that are accepted but not counted yet.
    """
    return min(limits.connections, max(_FEWEST, most_open_files() // 4))
