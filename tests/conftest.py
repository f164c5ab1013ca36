"""What several tests need: a small text, the corpus made from it, and the folder of real corpora."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from facts import make_run, write_texts
from spalm.corpus import Corpus, CorpusSettings, build_corpus
from spalm.learning import Hardware
from spalm.recipe import Run
from spalm.semiparametric import FinishedRun
from spalm.serving import Explorer, open_explorer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "old", "dog", "slept", "near", "my", "fire"]


torch.set_num_threads(1)  # the tensors here are tiny: a second thread only waits for the first


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora; without it, the tests that need one are skipped and say so."""
    folder = os.environ.get("SPALM_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SPALM_DATA does not name a folder of real corpora")
    return Path(folder)


def sentences(count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(" ".join(random.choice(WORDS, random.integers(3, 9))) + " .\n" for _ in range(count))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Twelve small documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(12):
        (folder / f"story-{index}.txt").write_text(sentences(40, index))
    return folder


def word_corpus(folder: Path, out: Path) -> Corpus:
    source = {"kind": "text", "path": str(folder), "dev_share": 0.1, "test_share": 0.1}
    settings = CorpusSettings.parse({"source": source, "tokeniser": {"kind": "words"}}, "test")
    return build_corpus(settings, out)


@pytest.fixture
def corpus(text_folder: Path, tmp_path: Path) -> Corpus:
    return word_corpus(text_folder, tmp_path / "corpus")


@pytest.fixture(scope="session")
def facts_run(tmp_path_factory) -> Run:
    """A run, not yet carried out: whoever asks for a stage makes it."""
    texts = tmp_path_factory.mktemp("facts")
    write_texts(texts)
    return make_run(texts, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def finished(facts_run) -> FinishedRun:
    """The same, carried out to its end."""
    facts_run.everything(Console(quiet=True))
    return FinishedRun(facts_run.directory)


@pytest.fixture(scope="session")
def explorer(finished) -> Explorer:
    return open_explorer(finished, Hardware("cpu", 1))
