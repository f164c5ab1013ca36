"""The queue in which requests wait for the model, and from which they get its work."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
from anyio import to_thread
from starlette.types import Receive

from spalm.generation import AnswerBatch, AnswerRequest, Chunk
from spalm.server.model_thread import Answers, Call, ModelThread, ServerStopping

S = TypeVar("S")
T = TypeVar("T")
_PREPARED_AT_ONCE = 2
"""Number of requests that are tokenised at the same time."""
_SEARCHED_AT_ONCE = 1
"""Number of requests for which passages are ranked at the same time. The first may take long; others go on."""
_STOP_SECONDS = 5.0
"""Seconds that the present step may take when the server ends."""


class QueueFull(Exception):
    """The queue is full: no further request may wait."""


class RequestTimedOut(Exception):
    """A request took longer than it may."""


class ClientGone(Exception):
    """The client of a request has left."""


class RequestQueue:
    """Gives requests to the model's thread, so that the server can answer others meanwhile.

    Answers are generated side by side; other work is done between their steps, one piece at a time. A client that
    disconnects gives up its place, whether it waits or is served. A request that arrives when the queue is full is
    refused at once.
    """

    def __init__(self, capacity: int, batch: AnswerBatch | None = None, seconds: float = math.inf):
        """`seconds` is the time that a request may take, with its time in the queue."""
        self.capacity = capacity
        self.size = 0
        """Number of requests that wait or are worked on."""
        self.refused = 0
        """Number of requests refused because the queue was full."""
        self.departed = 0
        """Number of requests whose clients left before the end."""
        self.closed = False
        """Whether the server is stopping: no request is begun any more."""
        self._seconds = seconds
        self._model = ModelThread(batch)
        self._preparing = {False: anyio.Semaphore(_PREPARED_AT_ONCE), True: anyio.Semaphore(_SEARCHED_AT_ONCE)}

    def close(self) -> None:
        """Lets the present requests end and begins no other."""
        self.closed = True
        self._model.close()

    def stop(self) -> None:
        """Ends all work."""
        self.close()
        self._model.stop(_STOP_SECONDS)

    @asynccontextmanager
    async def turn(self, receive: Receive) -> "AsyncIterator[Turn]":
        """Gives a request its place, until the block ends or `receive` reports that the client left."""
        if self.closed:
            raise ServerStopping
        if self.size >= self.capacity:
            self.refused += 1
            raise QueueFull
        self.size += 1
        turn = Turn(self._model, self._preparing, anyio.current_time() + self._seconds)
        try:
            with anyio.CancelScope() as scope:
                watch = asyncio.create_task(self._watch_client(receive, scope))
                try:
                    yield turn
                finally:
                    watch.cancel()
            if scope.cancelled_caught:
                raise ClientGone
        except asyncio.CancelledError:
            if not self.closed:
                raise
            raise ServerStopping from None  # the time to finish is over
        finally:
            turn.end()
            self.size -= 1

    async def run(self, receive: Receive, work: Callable[[], T]) -> T:
        """Runs one piece of work in a turn of its own. Long work should call `check` now and then."""
        async with self.turn(receive) as turn:
            return await turn.run(work)

    def check(self) -> None:
        """Makes a step of the answers within long work in the model's thread.

        Raises, and so ends the work, if nobody waits for it any more.
        """
        self._model.check()

    async def _watch_client(self, receive: Receive, scope: anyio.CancelScope) -> None:
        """Waits until the client disconnects, and then cancels its request."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.departed += 1
        scope.cancel()


class Turn:
    """The place of one request. What it began ends with it.

    Work that is not done by the `deadline` raises RequestTimedOut; answers end with what they have.
    """

    def __init__(self, model: ModelThread, preparing: dict[bool, anyio.Semaphore], deadline: float):
        """`preparing` bounds the work beside the model, by whether it searches the memory."""
        self._model, self._preparing, self._deadline = model, preparing, deadline
        self._begun: list[Call | Answers] = []

    async def prepare(self, work: Callable[[], T], *, searches: bool = False) -> T:
        """Runs work that does not need the model, such as tokenising, in a thread beside it."""
        with self._in_time():
            async with self._preparing[searches]:
                return await to_thread.run_sync(work)
        raise RequestTimedOut

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work that needs the model alone, between two steps of the answers."""
        call = self._model.call(work)
        self._begun.append(call)
        with self._in_time():
            return await asyncio.wrap_future(call.result)
        raise RequestTimedOut

    async def run_each(self, work: Callable[[S], T], inputs: Sequence[S]) -> list[T]:
        """Runs work that needs the model alone for each of several inputs, between different steps of the answers."""
        return [await self.run(partial(work, each)) for each in inputs]

    async def answers(self, requests: Sequence[AnswerRequest]) -> AsyncIterator[Chunk]:
        """Yields the chunks of answers, of several as they come. At the deadline they end as if at their length."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[Chunk] | BaseException] = asyncio.Queue()
        begun = self._model.answer(requests, lambda each: loop.call_soon_threadsafe(arrived.put_nowait, each) and None)
        self._begun.append(begun)
        left, found = {request.choice for request in requests}, []
        while left:
            with self._in_time() as time:
                found = await arrived.get()
            if time.cancelled_caught:
                if not found:
                    raise RequestTimedOut
                found = [Chunk(choice=choice, finish_reason="length") for choice in sorted(left)]
            if isinstance(found, BaseException):
                raise found
            for chunk in found:
                if chunk.finish_reason is not None:
                    left.discard(chunk.choice)
                yield chunk

    def _in_time(self) -> anyio.CancelScope:
        """Returns a block that is left at the deadline."""
        return anyio.CancelScope(deadline=self._deadline)

    def end(self) -> None:
        """Ends what is not finished."""
        for work in self._begun:
            self._model.cancel(work)
