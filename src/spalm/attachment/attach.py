"""Attaching a memory to a frozen, pretrained language model: texts in, a fitted and measured combiner out.

The figures are measured before dev and test join the memory.
"""

from dataclasses import asdict
from pathlib import Path

from torch import nn

from spalm import artifact
from spalm.artifact import Draft, Stage
from spalm.attachment.attached import (
    ATTACHED_FILE,
    COMBINER_KIND,
    GATE_FILE,
    MIXTURE_FILE,
    POLICY_FILE,
    Attached,
)
from spalm.attachment.base import PretrainedBase
from spalm.attachment.examples import ExampleSets
from spalm.attachment.learning import fit_combiner
from spalm.attachment.measuring import perplexities, search_curve
from spalm.attachment.policy import search_threshold
from spalm.attachment.settings import AttachSettings
from spalm.compute import Execution
from spalm.console import say
from spalm.corpus import Corpus, CorpusSettings, TokeniserSettings, build_corpus
from spalm.corpus.sources.text_files import TextFiles
from spalm.lm.pretrained import PretrainedFolder, locate_pretrained
from spalm.memory import Memory, MemorySettings, open_memory, remember, source_of_split
from spalm.runs import HELD_OUT
from spalm.runs.checks import exclusion_notice, resolve_exclusion
from spalm.semiparametric import Search, open_search
from spalm.semiparametric.search import OTHER_DOCUMENTS
from spalm.training.checkpoint import save_tensors

_VERSION = 2


def attach(model: str, texts: list[Path], directory: Path, settings: AttachSettings, execution: Execution) -> Attached:
    """Makes a model with a memory at `directory`, or finds it there; a killed run continues.

    `model` is a folder, a name on the Hugging Face hub or a .gguf file. Keys are computed by the engine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    folder = locate_pretrained(model, directory / "model")
    execution.engine.refuse_unless_visible(folder.path / "config.json")
    base = PretrainedBase(folder, folder.digest, execution.hardware, settings.context, settings.stride)
    corpus = build_corpus(_corpus_settings(settings, texts, folder), directory / "corpus", restart=execution.restart)
    memory = _remember_training(base, corpus, directory / "memory", execution)
    _fit_and_measure(base, corpus, memory, settings, directory=directory, execution=execution)
    for split in HELD_OUT:
        remember(memory, base.encoder, corpus.split(split), source_of_split(corpus, split), execution=execution)
    description = {"source": Path(model).name, "model": _location(folder, directory), "digest": base.digest}
    artifact.write_json(directory / ATTACHED_FILE, {**description, "settings": settings.as_json()})
    return Attached(directory, execution.hardware)


def _corpus_settings(settings: AttachSettings, texts: list[Path], folder: PretrainedFolder) -> CorpusSettings:
    source = TextFiles(
        kind="text",
        path=[str(path.expanduser().resolve()) for path in texts],
        dev_share=settings.dev_share,
        test_share=settings.test_share,
        document_start=settings.document_start,
    )
    tokeniser = TokeniserSettings(kind="pretrained", path=str(folder.path.resolve()))
    return CorpusSettings(source=source, tokeniser=tokeniser)


def _remember_training(base: PretrainedBase, corpus: Corpus, directory: Path, execution: Execution) -> Memory:
    """Returns the memory with every position of the training documents in it."""
    train = corpus.split("train")
    memory = open_memory(directory, base.encoder, MemorySettings(), train, restart=execution.restart)
    remember(memory, base.encoder, train, source_of_split(corpus, "train"), execution=execution)
    return memory


def _location(folder: PretrainedFolder, directory: Path) -> str:
    """Returns the model's path: relative within `directory`, so that the directory can be moved, else absolute."""
    path = folder.path.resolve()
    within = path.is_relative_to(directory.resolve())
    return str(path.relative_to(directory.resolve()) if within else path)


def _fit_and_measure(
    base: PretrainedBase,
    corpus: Corpus,
    memory: Memory,
    settings: AttachSettings,
    *,
    directory: Path,
    execution: Execution,
) -> None:
    """Makes the artifact of the fitted combiner, with its figures."""

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        search = _search_of_training(corpus, memory, settings, directory / "index")
        examples = ExampleSets.collect(base, corpus, memory, search, settings)
        fitted = fit_combiner(settings, examples, base.model)
        modules: dict[str, nn.Module] = {MIXTURE_FILE: fitted.mixture, POLICY_FILE: fitted.policy}
        if fitted.gate is not None:
            modules[GATE_FILE] = fitted.gate
        for file, module in modules.items():
            save_tensors(draft.directory / file, module.state_dict())
        facts = {
            "knn": asdict(fitted.knn),
            "cache": asdict(fitted.cache),
            "neighbours": fitted.mixture.neighbours,
            "width": base.model.width,
            "figures": {
                split: perplexities(held_out, fitted, base.model)
                for split, held_out in (("dev", examples.dev), ("test", examples.test))
            },
            "curve": search_curve(base, fitted, examples, memory.entries()),
            "threshold": search_threshold(fitted.policy(examples.dev.base.hidden), settings.search),
        }
        return facts, list(modules)

    parents = {"model": base.digest, "corpus": corpus.digest, "memory": memory.lineage()[1]}
    stage = Stage(COMBINER_KIND, _VERSION, settings.as_json(), parents, cheap=True)
    stage.make(directory / "combiner", fill, restart=execution.restart)


def _search_of_training(corpus: Corpus, memory: Memory, settings: AttachSettings, index: Path) -> Search:
    """Returns a search of the training documents alone, whatever else the memory holds by now.

    A training position finds nothing of its own document or, where one document is most of the text, nothing of its
    surroundings.
    """
    train = corpus.split("train")
    first = memory.first_id(source_of_split(corpus, "train"))
    assert first is not None
    opened = open_search(memory, index, settings.neighbours)
    exclusion = resolve_exclusion(OTHER_DOCUMENTS, train)
    if notice := exclusion_notice(OTHER_DOCUMENTS, exclusion, train):
        say(notice)
    return Search(opened.searcher, opened.count, below=first + len(train), exclusion=exclusion)
