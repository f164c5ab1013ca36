"""Attaching a memory to a frozen, pretrained language model: texts in, a fitted and measured combiner out.

The figures are measured with the training documents alone, whatever else the memory holds.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel
from torch import nn

from spalm.artifact import Draft, Stage
from spalm.attachment.attached import (
    ATTACHED_FILE,
    COMBINER_KIND,
    GATE_FILE,
    MIXTURE_FILE,
    POLICY_FILE,
    Attached,
    is_attached,
    read_description,
)
from spalm.attachment.base import PretrainedBase
from spalm.attachment.fitting.examples import ExampleSets, LearnedText
from spalm.attachment.fitting.learning import fit_combiner
from spalm.attachment.fitting.measuring import (
    log_probabilities_of_rows,
    overlap,
    perplexities,
    search_curve,
    sums_by_document,
)
from spalm.attachment.keyed_text import CHOICE_FILE, KeyedText, choose_memory, keys_for_library
from spalm.attachment.search_policy import search_threshold
from spalm.attachment.settings import AttachSettings
from spalm.compute import Execution
from spalm.console import bar, say
from spalm.corpus import Corpus, CorpusSettings, TokeniserSettings, build_corpus, tokenise_files
from spalm.corpus.sources.text_files import TextFiles
from spalm.digests import KNOWN, KnownDigests, digest_of_file, digest_of_json, updating_sums
from spalm.errors import InputError
from spalm.files import read_json, write_json
from spalm.lm.pretrained import PretrainedFolder, locate_pretrained
from spalm.memory import Encoder, Memory, MemorySettings, open_memory, remember, source_of_split, source_of_text
from spalm.paths import resolved_path, user_path
from spalm.runs import HELD_OUT
from spalm.runs.checks import exclusion_notice, resolve_exclusion
from spalm.semiparametric import MemorySearch, Search, open_search
from spalm.semiparametric.search import OTHER_DOCUMENTS
from spalm.training.checkpoint import save_tensors

_VERSION = 3
HUB_FILE = "hub.json"
"""File that holds which commit of a repository on the hub the model is."""


def attach(
    model: str, texts: list[Path], directory: Path, *, settings: AttachSettings, execution: Execution
) -> Attached:
    """Makes a model with a memory at `directory`, or finds it there; a killed run continues.

    `model` is a folder, a name on the Hugging Face hub or a .gguf file. Keys are computed by the engine.
    """
    _refuse_missing_texts(texts, settings)
    directory.mkdir(parents=True, exist_ok=True)
    folder = _locate(model, directory)
    execution.engine.refuse_unless_visible(folder.path / "config.json")
    digest, *earlier = folder.digests(KnownDigests(directory / KNOWN).of)
    begun = read_description(directory)[1] if is_attached(directory) else None
    digest = begun if begun in earlier else digest
    base = PretrainedBase(folder, digest, execution.hardware, settings.context, settings.stride)
    corpus = build_corpus(_corpus_settings(settings, texts, folder), directory / "corpus", restart=execution.restart)
    train = corpus.split("train")
    exclusion = resolve_exclusion(OTHER_DOCUMENTS, train)
    if notice := exclusion_notice(OTHER_DOCUMENTS, exclusion, train):
        say(notice)
    settings, base = choose_memory(settings, base, corpus, directory=directory, execution=execution)
    remembered = _remember_training(base, corpus, directory / "memory", settings=settings, execution=execution)
    for split in HELD_OUT:  # what is learned and measured finds nothing of them
        source = source_of_split(corpus, split)
        remember(remembered.memory, remembered.encoder, corpus.split(split), source=source, execution=execution)
    _fit_and_measure(base, corpus, remembered, settings=settings, directory=directory, execution=execution)
    description = {"source": Path(model).name, "model": _location(folder, directory), "digest": base.digest}
    description |= {"keys_by": asdict(base.keys_by)}
    description |= {"revision": folder.revision} if folder.revision else {}
    beside = [name for name in (CHOICE_FILE, HUB_FILE) if (directory / name).exists()]
    with updating_sums(directory, [ATTACHED_FILE, *beside]):
        write_json(directory / ATTACHED_FILE, {**description, "settings": settings.as_json()})
    return Attached(directory, execution.hardware)


class _HubSource(BaseModel):
    """The form of the file that holds which commit of a repository on the hub is used."""

    name: str
    revision: str


def _locate(model: str, directory: Path) -> PretrainedFolder:
    """Finds the model; one from the hub at the commit with which the folder was begun."""
    path = directory / HUB_FILE
    known: _HubSource | None = read_json(path, _HubSource, remedy=f"remove {path}") if path.exists() else None
    begun = known.revision if known is not None and known.name == model else None
    folder = locate_pretrained(model, directory / "model", begun)
    if folder.revision is not None:
        write_json(path, {"name": model, "revision": folder.revision})
    return folder


def _refuse_missing_texts(texts: list[Path], settings: AttachSettings) -> None:
    """Raises an error if a file or folder of text does not exist, before the model is opened."""
    for path in [*texts, *map(Path, settings.library), *([Path(settings.like)] if settings.like else [])]:
        if not user_path(path).exists():
            raise InputError(f"there is no {path}; give files or folders of text")


def _corpus_settings(settings: AttachSettings, texts: list[Path], folder: PretrainedFolder) -> CorpusSettings:
    source = TextFiles(
        kind="text",
        path=[str(resolved_path(path)) for path in texts],
        dev_share=settings.dev_share,
        test_share=settings.test_share,
        document_start=settings.document_start,
    )
    tokeniser = TokeniserSettings(kind="pretrained", path=str(folder.path.resolve()))
    return CorpusSettings(source=source, tokeniser=tokeniser)


@dataclass(frozen=True)
class _TrainingMemory:
    """A memory with every position of the training documents in it."""

    memory: Memory
    learned: LearnedText
    """The documents from which the combiner learns: those with keys, or all if there are none."""
    end: int
    """Id after the last training position; what has higher ids was remembered later."""
    encoder: Encoder | None
    """Makes keys of the held-out documents; None: they get none, because not all training documents have keys."""


def _remember_training(
    base: PretrainedBase, corpus: Corpus, directory: Path, *, settings: AttachSettings, execution: Execution
) -> _TrainingMemory:
    """Remembers the training documents, those with keys first."""
    train, source = corpus.split("train"), source_of_split(corpus, "train")
    memory = open_memory(directory, base.encoder, MemorySettings(), stream=train, restart=execution.restart)
    chosen = KeyedText.choose(train, settings, corpus)
    divided = len(chosen.with_keys) > 0 and len(chosen.without_keys) > 0
    first_ids = []
    for text, encoder in ((chosen.with_keys, base.encoder), (chosen.without_keys, None)):
        own = {**source, "documents": source_of_text(text)["text"]} if divided else source
        if len(text):
            remember(memory, encoder, text, source=own, execution=execution)
            first_ids.append(memory.first_id(own))
    learned = LearnedText(chosen.with_keys if len(chosen.with_keys) else train, first_ids[0])
    end = first_ids[-1] + (len(chosen.without_keys) if divided else len(train))
    if settings.library:
        end = _remember_library(memory, base.encoder, corpus, settings=settings, execution=execution)
    return _TrainingMemory(memory, learned, end, None if len(chosen.without_keys) else base.encoder)


def _remember_library(
    memory: Memory, encoder: Encoder, corpus: Corpus, *, settings: AttachSettings, execution: Execution
) -> int:
    """Remembers the library; returns the id after its last position.

    Its documents get no keys, unless the settings ask for more of them than there are training positions.
    """
    paths = [resolved_path(path) for path in settings.library]
    files = TextFiles(kind="text", path=[str(path) for path in paths]).files()
    content = [(name, digest_of_file(path)) for name, path in files]
    source = {"library": digest_of_json([content, settings.document_start]), "corpus": corpus.digest}
    if not memory.remembers(source):
        with bar("tokenise the library", None):
            text = tokenise_files(paths, corpus.tokeniser, settings.document_start)
        if keys_for_library(settings, corpus):
            chosen = KeyedText.choose_from_library(text, settings, corpus)
            remember(memory, encoder, chosen.with_keys, source={**source, "keys": settings.keys}, execution=execution)
            text = chosen.without_keys
        remember(memory, None, text, source=source, execution=execution)
    return memory.end_id(source)


def _location(folder: PretrainedFolder, directory: Path) -> str:
    """Returns the model's path: relative within `directory`, so that the directory can be moved, else absolute."""
    path = folder.path.resolve()
    within = path.is_relative_to(directory.resolve())
    return str(path.relative_to(directory.resolve()) if within else path)


def _fit_and_measure(
    base: PretrainedBase,
    corpus: Corpus,
    remembered: _TrainingMemory,
    *,
    settings: AttachSettings,
    directory: Path,
    execution: Execution,
) -> None:
    """Makes the artifact of the fitted combiner, with its figures."""

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        search = _search_of_training(corpus, remembered, settings, index=directory / "index")
        examples = ExampleSets.collect(base, corpus, search, learned=remembered.learned, settings=settings)
        fitted = fit_combiner(settings, examples, base.model)
        parts = {MIXTURE_FILE: fitted.mixture, POLICY_FILE: fitted.policy, GATE_FILE: fitted.gate}
        modules: dict[str, nn.Module] = {file: module for file, module in parts.items() if module is not None}
        for file, module in modules.items():
            save_tensors(draft.directory / file, module.state_dict())
        held_out = {"dev": (examples.dev, examples.dev_text), "test": (examples.test, examples.test_text)}
        rows = {split: log_probabilities_of_rows(each, fitted, base.model) for split, (each, _) in held_out.items()}
        facts = {
            **{name: asdict(knn) for name, knn in (("knn", fitted.knn), ("cache", fitted.cache)) if knn is not None},
            "neighbours": fitted.mixture.neighbours,
            "levels": fitted.mixture.levels,
            "width": base.model.width,
            "figures": {split: perplexities(found) for split, found in rows.items()},
            "documents": {split: sums_by_document(found, held_out[split][1]) for split, found in rows.items()},
            "overlap": {"dev": overlap(examples.dev), "test": overlap(examples.test)},
            "curve": search_curve(base, fitted, examples, entries=remembered.memory.entries()),
        }
        if fitted.policy is not None:
            facts["threshold"] = search_threshold(fitted.policy(examples.dev.base.hidden), settings.search)
        return facts, list(modules)

    batches = remembered.memory.lineage_below(remembered.end)
    parents = {"model": base.digest, "corpus": corpus.digest, "memory": digest_of_json(batches)}
    stage = Stage(COMBINER_KIND, _VERSION, settings.as_json(), parents, cheap=True)
    stage.make(directory / "combiner", fill, restart=execution.restart)


def _search_of_training(
    corpus: Corpus, remembered: _TrainingMemory, settings: AttachSettings, *, index: Path
) -> MemorySearch:
    """Returns a search of the training documents alone, whatever else the memory holds by now.

    A training position finds nothing of its own document or, where one document is most of the text, nothing of its
    surroundings.
    """
    memory, train = remembered.memory, corpus.split("train")
    exclusion = resolve_exclusion(OTHER_DOCUMENTS, train)
    nearest = None
    if settings.memory != "exact":
        opened = open_search(memory, index, settings.neighbours)
        nearest = Search(opened.searcher, opened.count, below=remembered.end, exclusion=exclusion)
    return MemorySearch(memory, nearest, memory.exact.current().below(remembered.end), exclusion)
