"""Small texts of a few words, and the corpus made from a folder of them."""

import sysconfig
from pathlib import Path

import numpy as np

from spalm.corpus import Corpus, CorpusSettings, build_corpus

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "old", "dog", "slept", "near", "my", "fire"]


def sentences(count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(" ".join(random.choice(WORDS, random.integers(3, 9))) + " .\n" for _ in range(count))


def word_corpus(folder: Path, out: Path) -> Corpus:
    source = {"kind": "text", "path": str(folder), "dev_share": 0.1, "test_share": 0.1}
    settings = CorpusSettings.parse({"source": source, "tokeniser": {"kind": "words"}}, "test")
    return build_corpus(settings, out)


def python_file(name: str) -> str:
    """The beginning of a module of the standard library."""
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text()[:400]


def write_python_files(folder: Path) -> None:
    for name in ("bisect", "cmd", "colorsys", "heapq", "linecache", "queue"):
        (folder / f"{name}.py").write_text(python_file(name))
