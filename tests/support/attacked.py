"""Folders that are attacked: copies to be changed, and the commands that read them afterwards."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

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


def uses_of(folder: Path, random: np.random.Generator) -> list[list[str]]:
    """Returns commands that read, and some that change, a run or an attached model."""
    where = str(folder)
    common = [
        ["generate", where, PROMPT, "--max-tokens", "2", "--cite"],
        ["trace", where, PROMPT, "--least", "1"],
        ["show", f"{where}/corpus"],
        ["show", f"{where}/memory", "--documents"],
        ["show", f"{where}/memory"],
        ["forget", where, "nothing of this name"],
        ["compact", where],
        ["index", where, "--out", f"{where}/index-2"],
    ]
    if (folder / "results.json").exists():
        stage = str(random.choice(sorted(str(path.parent) for path in folder.rglob("manifest.json"))))
        return [*common, ["study", where, str(random.choice(ANALYSES))], ["show", stage]]
    return [*common, ["remember", where, "--text", f"{where}/../new.txt"], ["score", where, f"{where}/../new.txt"]]


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
