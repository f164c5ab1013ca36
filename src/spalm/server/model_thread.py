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
    """Uses the model for all requests. Whoever waits longest for a slot gets it, but no request takes a second one
    while another waits for its first.
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
        """Raises, and so ends the present call, if nobody waits for it any more. To be called in this thread."""
        if self._ended or (self._current is not None and self._current.cancelled):
            raise ServerStopping

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
                self._leave()
                self._enter()
            if self._current is not None:
                self._do(self._current)
            if self._batch is not None and self._batch.running:
                self._step(self._batch)
        for request in self._requests:
            request.deliver(ServerStopping())

    def _leave(self) -> None:
        """Removes the answers of clients that left."""
        for request in self._requests:
            if request.cancelled and self._batch is not None:
                for answer in request.running:
                    self._batch.remove(answer)
        self._requests = [request for request in self._requests if not request.cancelled]

    def _enter(self) -> None:
        """Begins answers while there is room."""
        batch = self._batch
        while batch is not None and batch.has_room:
            waiting = [request for request in self._requests if request.waiting]
            if not waiting:
                return
            request = min(waiting, key=lambda each: len(each.running))
            request.running.append(batch.add(request.waiting.popleft()))

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
        """Makes one step of all answers and delivers what it gave."""
        try:
            found = {id(answer): chunks for answer, chunks in batch.step()}
        except Exception as error:
            batch.clear()
            with self._changed:
                failed = [request for request in self._requests if request.running]
                self._requests = [request for request in self._requests if not request.running]
            for request in failed:
                request.deliver(error)
            return
        with self._changed:
            requests = [request for request in self._requests if request.running]
        for request in requests:
            if chunks := [chunk for answer in request.running for chunk in found[id(answer)]]:
                with suppress(RuntimeError):  # the event loop is closed: the server has ended
                    request.deliver(chunks)
            request.running = [answer for answer in request.running if not answer.finished]
        with self._changed:
            self._requests = [request for request in self._requests if request.running or request.waiting]
