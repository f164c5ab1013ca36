"""Folders that are attacked: copies to be changed, and the commands that read them afterwards."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.testclient import TestClient

from spalm.memory import Memory

PROMPT = "ka1 lo3 mi4"
ANALYSES = ("outputs", "gates", "matches", "significance", "ablation", "curves")


def files_of(folder: Path) -> list[Path]:
    """Returns the files of a folder that hold anything."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, random: np.random.Generator, *, near_start: bool = False) -> str:
    """Flips a random bit of a file; near the start are headers and descriptions. Returns which."""
    content = bytearray(path.read_bytes())
    place = int(random.integers(min(len(content), 300) if near_start else len(content)))
    content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    return f"bit of byte {place} of {path}"


@contextmanager
def flipped(path: Path, random: np.random.Generator, *, near_start: bool = False) -> Iterator[str]:
    """Flips a random bit of a file, which is then as it was."""
    good = path.read_bytes()
    try:
        yield flip(path, random, near_start=near_start)
    finally:
        path.write_bytes(good)


def replaced_by_copy(folder: Path, copy: Path) -> Path:
    """Puts a copy of a folder in the place of an older one."""
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(folder, copy, symlinks=True)


def document_of(folder: Path) -> str:
    """Returns the name of a document that a run or an attached model remembers."""
    return Memory(folder / "memory").entries().live_documents.names[0]


def uses_of(folder: Path, random: np.random.Generator, name: str) -> list[list[str]]:
    """Returns commands that read, and some that change, a run or an attached model with a document of this name."""
    where = str(folder)
    common = [
        ["generate", where, PROMPT, "--max-tokens", "2", "--cite"],
        ["trace", where, PROMPT, "--least", "1"],
        ["show", f"{where}/corpus"],
        ["show", f"{where}/memory", "--documents"],
        ["show", f"{where}/memory"],
        ["forget", where, "nothing of this name"],
        ["forget", where, name],
        ["forget", where, name, "--receipt"],
        ["compact", where],
        ["serve", where, "--port", "0"],
        ["index", where, "--out", f"{where}/index-2"],
    ]
    if (folder / "results.json").exists():
        stage = str(random.choice(sorted(str(path.parent) for path in folder.rglob("manifest.json"))))
        return [*common, ["study", where, str(random.choice(ANALYSES))], ["report", where], ["show", stage]]
    new = f"{where}/../new.txt"
    attach = ["attach", f"{where}/model", new, "--out", f"{where}/../made", "--memory", "exact", "--restart"]
    return [*common, ["remember", where, "--text", new], ["score", where, new], attach]


def ask(app: FastAPI, *_: Any, **__: Any) -> None:
    """Takes the place of a server: it is asked a few things, and then ends. Errors of kind 500 are raised."""
    message = {"role": "user", "content": PROMPT}
    client = TestClient(app, base_url="http://127.0.0.1")
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "cite": True}),
        ("/v1/chat/completions", {"messages": [message], "max_tokens": 2}),
        ("/api/generate", {"model": app.title, "prompt": PROMPT, "stream": False, "options": {"num_predict": 2}}),
        ("/explain", {"text": PROMPT}),
    ):
        assert client.post(path, json=body).status_code < 500, path
    for path in ("/health", "/metrics", "/v1/models", "/memory/documents", "/api/documents"):
        assert client.get(path).status_code < 500, path
    app.state.queue.stop()


def uses_of_memory(folder: Path) -> list[list[str]]:
    """Returns commands that read or change a memory."""
    where = str(folder)
    return [
        ["show", where],
        ["show", where, "--documents"],
        ["show", where, "--versions"],
        ["verify", where],
        ["forget", where, "text-1"],
        ["compact", where],
        ["index", where, "--out", f"{where}/../index-2"],
    ]
