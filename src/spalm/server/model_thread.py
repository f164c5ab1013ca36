"""The thread in which the model works: answers side by side, step by step, and other work between the steps."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spalm.generation import AnswerBatch, AnswerRequest, Chunk, RunningAnswer


class ServerStopping(Exception):
    """The server is about to end."""


@dataclass(eq=False)
class Call:
    """A function that is called between two steps."""

    work: Callable[[], Any]
    result: Future = field(default_factory=Future)
    cancelled: bool = False


@dataclass(eq=False)
class Answers:
    """The answers of one request."""

    waiting: deque[AnswerRequest]
    deliver: Callable[["list[Chunk] | BaseException"], None]
    """Takes the chunks of a step, or the error that ended the answers; called in the model's thread."""
    running: list[RunningAnswer] = field(default_factory=list)
    cancelled: bool = False


class ModelThread:
    """Uses the model for all requests.

    Whoever waits longest for a slot gets it, but no request takes a second one while another waits for its first.
    """

    def __init__(self, batch: AnswerBatch | None):
        """Without a `batch` there are calls only."""
        self._batch = batch
        self._calls: deque[Call] = deque()
        self._requests: list[Answers] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: Call | None = None
        self._closed = self._ended = False

    def call(self, work: Callable[[], Any]) -> Call:
        """Has a function called; its result is in the call's future."""
        call = Call(work)
        self._add(call)
        return call

    def answer(
        self, requests: Sequence[AnswerRequest], deliver: Callable[["list[Chunk] | BaseException"], None]
    ) -> Answers:
        """Has answers generated; their chunks are delivered after each step."""
        answers = Answers(deque(requests), deliver)
        self._add(answers)
        return answers

    def _add(self, work: Call | Answers) -> None:
        """Adds work; the thread is started with the first."""
        with self._changed:
            if self._closed:
                raise ServerStopping
            if isinstance(work, Call):
                self._calls.append(work)
            else:
                self._requests.append(work)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="model", daemon=True)
                self._thread.start()

    def cancel(self, work: Call | Answers) -> None:
        """Ends work that nobody waits for any more, at its next step."""
        with self._changed:
            work.cancelled = True
            self._changed.notify()

    def check(self) -> None:
        """Makes a step of the answers within a long call, which calls this now and then, in this thread.

        Raises, and so ends the call, if nobody waits for it any more.
        """
        if self._ended or (self._current is not None and self._current.cancelled):
            raise ServerStopping
        self._answer()

    def close(self) -> None:
        """Takes no new work; what has begun goes on, what has not is refused."""
        with self._changed:
            self._closed = True
            calls, self._calls = self._calls, deque()
            unbegun = [request for request in self._requests if not request.running]
            self._requests = [request for request in self._requests if request.running]
            self._changed.notify()
        for call in calls:
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(ServerStopping())
        for request in unbegun:
            request.deliver(ServerStopping())

    def stop(self, patience: float) -> None:
        """Ends all work and the thread; waits for it at most `patience` seconds."""
        self.close()
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(patience)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._calls or self._requests)
                if self._ended:
                    break
                self._current = self._calls.popleft() if self._calls else None
            if self._current is not None:
                self._do(self._current)
                self._current = None
            self._answer()
        for request in self._requests:
            _deliver(request, ServerStopping())

    def _answer(self) -> None:
        """Makes one step of the answers; those that wait begin while there is room."""
        if self._batch is None:
            return
        with self._changed:
            self._leave(self._batch)
            failed = self._enter(self._batch)
        for request, error in failed:
            _deliver(request, error)
        if self._batch.running:
            self._step(self._batch)

    def _leave(self, batch: AnswerBatch) -> None:
        """Removes the answers of clients that left."""
        for request in [request for request in self._requests if request.cancelled]:
            self._end(request, batch)

    def _end(self, request: Answers, batch: AnswerBatch) -> None:
        """Removes a request and its answers."""
        self._requests.remove(request)
        for answer in request.running:
            if answer in batch.running:
                batch.remove(answer)

    def _enter(self, batch: AnswerBatch) -> list[tuple[Answers, Exception]]:
        """Adds answers while there is room; returns the requests for which that failed, which are removed."""
        failed = []
        while batch.has_room and (waiting := [request for request in self._requests if request.waiting]):
            request = min(waiting, key=lambda each: len(each.running))
            try:
                request.running.append(batch.add(request.waiting.popleft()))
            except Exception as error:
                self._end(request, batch)
                failed.append((request, error))
        return failed

    def _do(self, call: Call) -> None:
        if not call.result.set_running_or_notify_cancel():
            return
        try:
            result = call.work()
        except BaseException as error:
            call.result.set_exception(error)
        else:
            call.result.set_result(result)

    def _step(self, batch: AnswerBatch) -> None:
        """Makes one step of all answers and delivers what it gave. A request of which an answer failed is ended."""
        found = {id(answer): chunks for answer, chunks in batch.step()}
        with self._changed:
            requests = [request for request in self._requests if request.running]
        for request in requests:
            error = next((answer.error for answer in request.running if answer.error is not None), None)
            chunks = [chunk for answer in request.running for chunk in found[id(answer)]]
            if error is not None or chunks:
                _deliver(request, error or chunks)
            with self._changed:
                request.running = [answer for answer in request.running if not answer.finished]
                if error is not None or not (request.running or request.waiting):
                    self._end(request, batch)


def _deliver(request: Answers, found: "list[Chunk] | BaseException") -> None:
    """Gives a request its chunks or its error, unless the server has ended."""
    with suppress(RuntimeError):  # the event loop is closed
        request.deliver(found)
