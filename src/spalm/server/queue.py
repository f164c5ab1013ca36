"""The queue in which requests wait for the model, which works on one of them at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio import from_thread, to_thread
from starlette.types import Receive

T = TypeVar("T")
_END: Any = object()


class QueueFull(Exception):
    """The queue is full: no further request may wait."""


class ClientGone(Exception):
    """The client of a request has left."""


class ServerStopping(Exception):
    """The server is about to end."""


class RequestQueue:
    """Runs the work of one request at a time in a thread, so that the server can answer other requests meanwhile.

    A client that disconnects gives up its place, whether it waits or is served. A request that arrives when the queue
    is full is refused at once.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.size = 0
        """Number of requests that wait or are worked on."""
        self.refused = 0
        """Number of requests refused because the queue was full."""
        self.departed = 0
        """Number of requests whose clients left before the end."""
        self.closed = False
        """Whether the server is stopping: no request gets its turn any more."""
        self._cancelled = False
        self._lock = asyncio.Lock()

    def close(self) -> None:
        """Lets the current request end and gives no other a turn."""
        self.closed = True

    @asynccontextmanager
    async def turn(self, receive: Receive) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Once `receive` reports that the client left, no further step is begun."""
        if self.closed:
            raise ServerStopping
        if self.size >= self.capacity:
            self.refused += 1
            raise QueueFull
        self.size += 1
        try:
            with anyio.CancelScope() as scope:
                watch = asyncio.create_task(self._watch_client(receive, scope))
                try:
                    async with self._lock:
                        if self.closed:
                            raise ServerStopping
                        yield
                finally:
                    watch.cancel()
            if scope.cancelled_caught:
                raise ClientGone
        except asyncio.CancelledError:
            if not self.closed:
                raise
            self._cancelled = True  # the time to finish is over; `check` ends the work
            raise ServerStopping from None
        finally:
            self.size -= 1

    async def steps(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """Yields what an iterator yields, running each step in a thread. To be used within a turn."""
        while (each := await to_thread.run_sync(next, iterator, _END)) is not _END:
            yield each

    async def run(self, receive: Receive, work: Callable[[], T]) -> T:
        """Runs one piece of work in a turn of its own. Long work should call `check` now and then."""
        async with self.turn(receive):
            return await to_thread.run_sync(work)

    def check(self) -> None:
        """Raises, and so ends the work in this thread, if nobody waits for it any more."""
        from_thread.check_cancelled()
        if self._cancelled:
            raise ServerStopping

    async def _watch_client(self, receive: Receive, scope: anyio.CancelScope) -> None:
        """Waits until the client disconnects, and then cancels its request."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.departed += 1
        scope.cancel()
