"""The desk at which requests are worked on, one at a time, and the line in front of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio import from_thread, to_thread
from starlette.types import Receive

T = TypeVar("T")
_END: Any = object()


class Busy(Exception):
    """The line is full."""


class Gone(Exception):
    """Whoever asked has left."""


class Stopping(Exception):
    """The server is about to end."""


class Desk:
    """Work goes on in a thread, so that the server answers what needs none. Whoever leaves, in line or at the desk,
    makes room; whoever comes when the line is full is turned away at once."""

    def __init__(self, longest: int):
        self.longest = longest
        self.line = 0
        """Requests that wait or are worked on."""
        self.turned_away = self.left = 0
        self.closed = self._over = False
        self._lock = asyncio.Lock()

    def close(self) -> None:
        """Nobody gets a turn any more; the work at hand may end."""
        self.closed = True

    @asynccontextmanager
    async def turn(self, receive: Receive) -> AsyncIterator[None]:
        """Holds the desk. `receive` tells when the client leaves: the present step is ended, and no other begun."""
        if self.closed:
            raise Stopping
        if self.line >= self.longest:
            self.turned_away += 1
            raise Busy
        self.line += 1
        try:
            with anyio.CancelScope() as presence:
                watch = asyncio.create_task(self._notice(receive, presence))
                try:
                    async with self._lock:
                        if self.closed:
                            raise Stopping
                        yield
                finally:
                    watch.cancel()
            if presence.cancelled_caught:
                raise Gone
        except asyncio.CancelledError:
            if not self.closed:
                raise
            self._over = True  # the server has waited for this long enough
            raise Stopping from None
        finally:
            self.line -= 1

    async def steps(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """What an iterator yields, each step made in a thread. Within a turn."""
        while (each := await to_thread.run_sync(next, iterator, _END)) is not _END:
            yield each

    async def work(self, receive: Receive, do: Callable[[], T]) -> T:
        """One piece of work in its own turn. What takes long asks `go_on` now and then."""
        async with self.turn(receive):
            return await to_thread.run_sync(do)

    def go_on(self) -> None:
        """Ends the work in this thread if nobody waits for it."""
        from_thread.check_cancelled()
        if self._over:
            raise Stopping

    async def _notice(self, receive: Receive, presence: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        presence.cancel()
