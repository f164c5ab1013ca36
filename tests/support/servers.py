"""Servers for tests: in a thread or in a process of their own, and models that can be held or told what to say."""

import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

import spalm
from spalm.attachment import Attached
from spalm.compute import Hardware
from spalm.generation import AttachedModels, Model, model_of
from spalm.memory import Encoder
from spalm.semiparametric import CombinedPrediction
from spalm.server import make_server, serve
from spalm.server.http.listen import BoundedServer
from support.commands import Fork

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PATIENCE = 60.0


def wait_until(what: Callable[[], Any], why: str = "it never came") -> Any:
    """The first answer that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(0.01)
    return found


def copied(folder: Path, to: Path, chat_template: str | None = None) -> Path:
    """A folder of one's own, to be changed."""
    shutil.copytree(folder, to)
    if chat_template is not None:
        (to / "chat_template.jinja").write_text(chat_template)
    return to


def open_attached(folder: Path) -> Attached:
    return Attached(folder, Hardware("cpu", 1))


def server_of(attached: Attached, change: Callable[[Model], Model] = lambda model: model, **more: Any) -> FastAPI:
    """Returns a server of an attached model, changed for a test."""
    return make_server(change(model_of(AttachedModels(attached))), **more)


def with_combiner(model: Model, combiner: Any) -> Model:
    """Returns the model with another combiner."""
    return replace(model, variant=replace(model.variant, combiner=combiner))


def client_of(app) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


class Held:
    """A combiner that waits to be let go, token by token."""

    def __init__(self) -> None:
        self.steps, self.begun = threading.Semaphore(0), threading.Event()

    def __call__(self, model: Model) -> Model:
        self._inner = model.combiner
        self.uses_neighbours, self.uses_matches = self._inner.uses_neighbours, self._inner.uses_matches
        return with_combiner(model, self)

    def combine(self, *about: Any, **more: Any) -> CombinedPrediction:
        self.begun.set()
        assert self.steps.acquire(timeout=PATIENCE)
        return self._inner.combine(*about, **more)

    def let_go(self, steps: int = 10_000) -> None:
        self.steps.release(steps)


class HeldEncoder:
    """Makes a model's encoder wait once, after the first windows of a document."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self, model: Model) -> Model:
        held = self

        class Waiting(Encoder):
            def keys(self, *about: Any, progress: Callable[[int], None], **how: Any) -> np.ndarray:
                def wait(positions: int) -> None:
                    held.begun.set()
                    assert held.let_go.wait(PATIENCE)
                    progress(positions)

                return super().keys(*about, progress=wait, **how)

        encoder = model.encoder
        model.models.encoder = Waiting(**{name: getattr(encoder, name) for name in encoder.__dataclass_fields__})
        return model


def hang_up(client: httpx.Client) -> None:
    """As a client does that is killed."""
    for connection in client._transport._pool.connections:
        connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class Scripted:
    """A combiner that says what it is told, over and over; the memory proposes nothing."""

    def __init__(self, tokens: list[int]):
        self._tokens, self._at = tokens, 0

    def __call__(self, model: Model) -> Model:
        self._inner = model.combiner
        self.uses_neighbours, self.uses_matches = self._inner.uses_neighbours, self._inner.uses_matches
        return with_combiner(model, self)

    def combine(self, *about: Any, **more: Any) -> CombinedPrediction:
        combined = self._inner.combine(*about, **more)
        scores = combined.log_probabilities.clone()
        for row in range(len(scores)):
            scores[row, self._tokens[self._at % len(self._tokens)]] = 50.0
            self._at += 1
        nothing = combined.neighbour_weights[:, :0]
        return CombinedPrediction(torch.log_softmax(scores, -1), torch.ones(len(scores)), nothing)


@contextmanager
def in_thread(app: FastAPI, patience: int = 5) -> Iterator[str]:
    """The address of a server on a port of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = BoundedServer(app, patience)
        app.state.server = server
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def stop(app: FastAPI) -> None:
    """As a signal does to a server that is not in a thread."""
    app.state.queue.close()
    app.state.server.should_exit = True


@contextmanager
def in_process(folder: Path, files: int = 1024) -> Iterator[tuple[Fork, str]]:
    """The process of a server, to be killed, which may open so many files, and its address."""
    process = Fork(_serve, folder, files)
    try:
        said = wait_until(lambda: _address(process) or process.poll() is not None, "the server did not begin")
        assert isinstance(said, str), process.errors()
        yield process, said
    finally:
        process.kill()


def _serve(arguments: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(arguments[1]),) * 2)
    execution = spalm.Execution(Hardware("cpu", 1))
    serve(make_server(spalm.load(arguments[0], execution=execution)), "127.0.0.1", 0, title="the server")


def _address(process: Fork) -> str | None:
    said = process.errors()
    return said.split("the server is at ")[1].split("/ ;")[0] if "stop it with Ctrl-C" in said else None
