"""Attaching a memory to a frozen, pretrained language model: text in, a combiner learned and measured, ready to use.

Figures are those of before dev and test were remembered.
"""

from dataclasses import asdict
from pathlib import Path

from spalm import artifact
from spalm.artifact import Draft, Stage
from spalm.attachment.attached import FILE, GATE, KIND, MIXTURE, POLICY, Attached
from spalm.attachment.base import PretrainedBase
from spalm.attachment.combiner import fit_combiner, perplexities, search_curve
from spalm.attachment.examples import ExampleSets
from spalm.attachment.settings import AttachSettings
from spalm.compute import Execution
from spalm.corpus import Corpus, CorpusSettings, TokeniserSettings, build_corpus
from spalm.corpus.sources.text_files import TextFiles
from spalm.lm.pretrained import PretrainedFolder, locate_pretrained
from spalm.memory import Memory, MemorySettings, open_memory, remember, source_of_split
from spalm.semiparametric import Search, open_search
from spalm.training.checkpoint import save_tensors

VERSION = 2


def attach(model: str, texts: list[Path], directory: Path, settings: AttachSettings, execution: Execution) -> Attached:
    """Makes everything at `directory`, or finds it made; a killed run goes on. Keys are made by the engine."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = locate_pretrained(model, directory / "model")
    execution.engine.refuse_unless_visible(folder.path / "config.json")
    base = PretrainedBase(folder, folder.digest, execution.hardware, settings.context, settings.stride)
    corpus = build_corpus(_corpus_settings(settings, texts, folder), directory / "corpus", restart=execution.restart)
    memory = _remember_training(base, corpus, directory / "memory", execution)
    _make_combiner(base, corpus, memory, settings, directory, execution)
    for split in ("dev", "test"):
        source = source_of_split(corpus, split)
        remember(memory, base.encoder, corpus.split(split), source, execution=execution)
    about = {"source": Path(model).name, "model": _location(folder, directory), "digest": base.digest}
    artifact.write_json(directory / FILE, {**about, "settings": settings.as_json()})
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
    train = corpus.split("train")
    memory = open_memory(directory, base.encoder, MemorySettings(), train, restart=execution.restart)
    remember(memory, base.encoder, train, source_of_split(corpus, "train"), execution=execution)
    return memory


def _location(folder: PretrainedFolder, directory: Path) -> str:
    """Returns the model's path: relative if it is within the directory, so that this can be moved, else absolute."""
    path = folder.path.resolve()
    within = path.is_relative_to(directory.resolve())
    return str(path.relative_to(directory.resolve()) if within else path)


def _make_combiner(
    base: PretrainedBase,
    corpus: Corpus,
    memory: Memory,
    settings: AttachSettings,
    directory: Path,
    execution: Execution,
) -> None:
    def fill(draft: Draft) -> tuple[dict, list[str]]:
        search = _search_of_training(corpus, memory, settings, directory / "index")
        examples = ExampleSets.of(base, corpus, memory, search, settings)
        fitted = fit_combiner(settings, examples, base.model)
        save_tensors(draft.directory / MIXTURE, fitted.mixture.state_dict())
        save_tensors(draft.directory / POLICY, fitted.policy.state_dict())
        if fitted.gate is not None:
            save_tensors(draft.directory / GATE, fitted.gate.state_dict())
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
        return facts, [MIXTURE, POLICY, *([] if fitted.gate is None else [GATE])]

    parents = {"model": base.digest, "corpus": corpus.digest, "memory": memory.lineage()[1]}
    stage = Stage(KIND, VERSION, settings.as_json(), parents, cheap=True)
    stage.make(directory / "combiner", fill, restart=execution.restart)


def _search_of_training(corpus: Corpus, memory: Memory, settings: AttachSettings, index: Path) -> Search:
    """Returns a search of the training documents alone, whatever was remembered since."""
    first = memory.first_id(source_of_split(corpus, "train"))
    assert first is not None
    opened = open_search(memory, index, settings.neighbours)
    return Search(opened.searcher, opened.count, below=first + len(corpus.split("train")))
