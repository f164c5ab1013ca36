"""Attaching a memory to a frozen, pretrained language model: text in, a combiner learned and measured, ready to use.

The mixture learns from training positions that do not see their own document: to a frozen model they are as new as dev.
A few of its numbers are then calibrated on dev, where kNN-LM is tuned too. Figures are those of before dev and test
were remembered; on test nothing was tuned.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalm import artifact
from spalm.artifact import Draft
from spalm.console import bar
from spalm.corpus import Corpus, CorpusSettings, TokenStream, build_corpus
from spalm.corpus.text import TextFiles
from spalm.corpus.tokeniser import TokeniserSettings
from spalm.engine import LOCAL, Engine
from spalm.learning import Hardware
from spalm.learning.checkpoint import save_tensors
from spalm.lm.pretrained import Pretrained, PretrainedFolder, locate_pretrained
from spalm.memory import Entries, Memory, MemorySettings, open_memory, remember, source_of_split
from spalm.neighbours import NOTHING
from spalm.semiparametric.adaptive import AdaptiveMixture, Lesson, Said, calibrate, learn_mixture
from spalm.semiparametric.attached import FILE, GATE, KIND, MIXTURE, POLICY, Attached, AttachSettings, Base
from spalm.semiparametric.dynamic import own_past
from spalm.semiparametric.frozen_gate import gated, learn_gate
from spalm.semiparametric.gate import Gate
from spalm.semiparametric.knn import Knn, tune_knn
from spalm.semiparametric.policy import SearchPolicy, learn_policy, threshold
from spalm.semiparametric.retrieval import Retrieved, moved_on
from spalm.semiparametric.searching import Search, open_search

VERSION = 2
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Of positions that are searched, on the curve."""
_ROWS = 256
_PIECE = 256
"""Positions in a row that are learned from."""
_ASKED, _QUESTION, _LEAST_CONTEXT = 5, 48, 6
"""One position in so many is learned as a question of so many tokens, from so many on."""
_FILES_OF_TOKENISERS = ("tokenizer", "special_tokens", "chat_template", "generation_config", "vocab", "merges")


def attach(
    model: str,
    texts: list[Path],
    directory: Path,
    settings: AttachSettings,
    hardware: Hardware,
    restart: bool = False,
    engine: Engine = LOCAL,
) -> Attached:
    """Makes everything at `directory`, or finds it made; a killed run goes on. Keys are made by the engine."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = locate_pretrained(model, directory / "model")
    engine.refuse_unless_seen(folder.path / "config.json")
    base = Base(folder, folder.digest, hardware, settings.context, settings.stride)
    corpus = build_corpus(_texts(settings, texts, folder), directory / "corpus", restart)
    memory = _memory(base, corpus, directory / "memory", restart, engine)
    _make_combiner(base, corpus, memory, settings, directory, restart)
    for split in ("dev", "test"):
        remember(memory, base.encoder, corpus.split(split), source_of_split(corpus, split), restart, engine=engine)
    about = {"source": Path(model).name, "model": _place(folder, directory), "digest": base.digest}
    artifact.write_json(directory / FILE, {**about, "settings": settings.as_json()})
    _look_like_a_model(directory, folder)
    return Attached(directory, hardware)


def _texts(settings: AttachSettings, texts: list[Path], folder: PretrainedFolder) -> CorpusSettings:
    source = TextFiles(
        kind="text",
        path=[str(path.expanduser().resolve()) for path in texts],
        dev_share=settings.dev_share,
        test_share=settings.test_share,
        document_start=settings.document_start,
    )
    tokeniser = TokeniserSettings(kind="pretrained", path=str(folder.path.resolve()))
    return CorpusSettings(source=source, tokeniser=tokeniser)


def _memory(base: Base, corpus: Corpus, directory: Path, restart: bool, engine: Engine) -> Memory:
    train = corpus.split("train")
    memory = open_memory(directory, base.encoder, MemorySettings(), train, restart)
    remember(memory, base.encoder, train, source_of_split(corpus, "train"), restart, engine=engine)
    return memory


def _place(folder: PretrainedFolder, directory: Path) -> str:
    """Within the folder it is attached in, so that this can be moved; elsewhere by its whole path."""
    path = folder.path.resolve()
    within = path.is_relative_to(directory.resolve())
    return str(path.relative_to(directory.resolve()) if within else path)


def _look_like_a_model(directory: Path, folder: PretrainedFolder) -> None:
    """Puts the files there by which transformers knows a model: it opens the folder as one."""
    config = artifact.read_json(folder.path / "config.json")
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    own = {"model_type": "spalm", "architectures": ["SpalmForCausalLM"], "base": config, **ids}
    artifact.write_json(directory / "config.json", own)
    for path in folder.path.iterdir():
        if path.name.startswith(_FILES_OF_TOKENISERS):
            artifact.write_atomically(directory / path.name, path.read_bytes())


def _make_combiner(
    base: Base, corpus: Corpus, memory: Memory, settings: AttachSettings, directory: Path, restart: bool
) -> None:
    def make(draft: Draft) -> tuple[dict, list[str]]:
        search = _search_of_training(corpus, memory, settings, directory / "index")
        lessons = Lessons.of(base, corpus, memory, search, settings)
        learned = learn(settings, lessons, base.model)
        save_tensors(draft.directory / MIXTURE, learned.mixture.state_dict())
        save_tensors(draft.directory / POLICY, learned.policy.state_dict())
        if learned.gate is not None:
            save_tensors(draft.directory / GATE, learned.gate.state_dict())
        facts = {
            "knn": asdict(learned.knn),
            "cache": asdict(learned.cache),
            "neighbours": learned.mixture.neighbours,
            "width": base.model.width,
            "figures": {
                name: figures(lesson, learned, base.model)
                for name, lesson in (("dev", lessons.dev), ("test", lessons.test))
            },
            "curve": _curve(base, learned, lessons, memory.entries()),
            "threshold": threshold(learned.policy(lessons.dev.said.hidden), settings.search),
        }
        return facts, [MIXTURE, POLICY, *([] if learned.gate is None else [GATE])]

    parents = {"model": base.digest, "corpus": corpus.digest, "memory": memory.lineage()[1]}
    artifact.stage(directory / "combiner", KIND, VERSION, settings.as_json(), parents, make, restart, cheap=True)


def _search_of_training(corpus: Corpus, memory: Memory, settings: AttachSettings, index: Path) -> Search:
    """Of nothing but the training documents, whatever was remembered since."""
    first = memory.first_id(source_of_split(corpus, "train"))
    assert first is not None
    opened = open_search(memory, index, settings.neighbours)
    return Search(opened.searcher, opened.count, below=first + len(corpus.split("train")))


@dataclass(frozen=True)
class Lessons:
    """Positions with what was retrieved for them: to learn from, to calibrate on, to measure on."""

    train: Lesson
    moved: Lesson
    """The training positions again, with neighbours moved on from the position before instead of searched for."""
    asked: Lesson
    """Training text again, as one asks for it: with little context, and with its document in the memory."""
    dev: Lesson
    test: Lesson
    test_text: TokenStream
    dev_past: Retrieved
    """What dev positions find among the last ones before them."""

    @classmethod
    def of(cls, base: Base, corpus: Corpus, memory: Memory, search: Search, settings: AttachSettings) -> "Lessons":
        train, moved = _training_lessons(base, memory, search, settings)
        asked = _asking_lesson(base, memory, search, corpus.split("train"), settings)
        texts = [corpus.split(split).beginning(settings.held_out) for split in ("dev", "test")]
        dev, test = (lesson_of_text(base, memory, search, text) for text in texts)
        past = own_past(memory.keys_of(dev.said.hidden), dev.targets.numpy(), search.count, settings.cache)
        return cls(train, moved, asked, dev, test, texts[1], past)


@dataclass(frozen=True)
class Learned:
    mixture: AdaptiveMixture
    policy: SearchPolicy
    knn: Knn
    cache: Knn
    """The continuous cache's weight, temperature and number."""
    gate: Gate | None = None


def learn(settings: AttachSettings, lessons: Lessons, model: Pretrained) -> Learned:
    knn, _ = tune_knn(lessons.dev.log_base, lessons.dev.retrieved, lessons.dev.targets, settings.knn)
    cache, _ = tune_knn(lessons.dev.log_base, lessons.dev_past, lessons.dev.targets, settings.knn)
    with bar("learn the mixture", None):
        mixture = learn_mixture(settings.adaptive, lessons.train.and_then(lessons.asked))
        mixture = calibrate(mixture, lessons.dev)
        # Without a search a position has what moved on, or, further from the last search, nothing.
        otherwise = (mixed(mixture, lessons.moved) + lessons.train.log_base) / 2
        gains = mixed(mixture, lessons.train) - otherwise
        policy = learn_policy(settings.policy, lessons.train.said.hidden, gains)
    wanted = settings.combiner == "gate"
    gate = learn_gate(settings.gate, settings.gate_training, model, lessons.train) if wanted else None
    return Learned(mixture, policy, knn, cache, gate)


def _training_lessons(base: Base, memory: Memory, search: Search, settings: AttachSettings) -> list[Lesson]:
    """From pieces of the memory's own documents, each without its document. Their keys are their hidden states."""
    entries = memory.entries()
    rows = _pieces(entries.first_row(search.below), settings)
    ids, tokens = entries.ids(rows), torch.from_numpy(entries.take_tokens(rows)).long()
    keys = entries.take(rows).astype(np.float32)
    with bar("neighbours of training positions", None):
        retrieved = search(keys, own=ids)
    documents = entries.documents_held.index_of(ids)
    goes_on = np.append(False, (np.diff(ids) == 1) & (np.diff(documents) == 0))
    before = retrieved[np.maximum(np.arange(len(rows)) - 1, 0)]
    before.distances[~goes_on] = torch.inf
    moved = moved_on(before, tokens.roll(1), entries)
    return lessons_of(base, torch.from_numpy(keys), [retrieved, moved], tokens)


def _asking_lesson(base: Base, memory: Memory, search: Search, train: TokenStream, settings: AttachSettings) -> Lesson:
    """Short pieces from within training documents, read as if they were the beginning of a text.

    Held-out text never tells that a memory may hold the very words: a question about what it holds does. Without these,
    a fact that stands in one document only is not trusted.
    """
    random = np.random.default_rng(settings.seed)
    starts = random.integers(0, max(1, len(train) - _QUESTION), settings.positions // _ASKED // _QUESTION + 1)
    texts = [train.tokens[start : start + _QUESTION] for start in np.sort(starts)]
    ends = np.cumsum([len(text) for text in texts])
    stream = TokenStream(np.concatenate(texts), ends, lambda: ["asked"] * len(texts), train.start)
    lesson = lesson_of_text(base, memory, search, stream)
    offsets = np.arange(len(stream)) - stream.begins[stream.documents_of(np.arange(len(stream)))]
    return lesson[torch.from_numpy(np.flatnonzero(offsets >= _LEAST_CONTEXT))]


def _pieces(count: int, settings: AttachSettings) -> np.ndarray:
    """Rows of a memory: as many as are to be learned from, in pieces from all over it."""
    random = np.random.default_rng(settings.seed)
    pieces = random.permutation(-(-count // _PIECE))[: -(-settings.positions // _PIECE)]
    rows = (np.sort(pieces)[:, None] * _PIECE + np.arange(_PIECE)).reshape(-1)
    return rows[rows < count]


def lesson_of_text(base: Base, memory: Memory, search: Search, text: TokenStream) -> Lesson:
    """Every position of a text, with what the memory holds for it."""
    hidden = base.hidden(text, f"read {len(text.names):,} document(s)")
    with bar("neighbours", None):
        retrieved = search(memory.keys_of(hidden))
    return lesson_of(base, hidden, retrieved, torch.from_numpy(text.targets(np.arange(len(text)))))


def lesson_of(base: Base, hidden: Tensor, retrieved: Retrieved, targets: Tensor) -> Lesson:
    """What the model says at positions whose hidden states are known."""
    return lessons_of(base, hidden, [retrieved], targets)[0]


def lessons_of(base: Base, hidden: Tensor, several: list[Retrieved], targets: Tensor) -> list[Lesson]:
    """The same for several lists of what was retrieved for these positions."""
    # Room is made beforehand. What is kept of each round would lie where its large tensors had been, and those of the
    # next would not fit there: gigabytes were lost so.
    said, log_base = [Said.room(hidden, retrieved) for retrieved in several], torch.empty(len(hidden))
    with bar("predict", len(hidden)) as shown:
        for rows, log_probabilities in _said(base, hidden):
            for whole, retrieved in zip(said, several):
                whole[rows] = Said.of(hidden[rows], log_probabilities, retrieved[rows])
            log_base[rows] = log_probabilities.gather(-1, targets[rows, None])[:, 0]
            shown.advance(len(rows))
    return [Lesson(whole, retrieved, log_base, targets) for whole, retrieved in zip(said, several)]


def _said(base: Base, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's log-probabilities of the whole vocabulary, some rows at a time."""
    for rows in torch.arange(len(hidden)).split(_ROWS):
        with torch.no_grad():
            yield rows, base.model.log_probabilities(hidden[rows].to(base.device)).cpu()


@torch.no_grad()
def mixed(mixture: AdaptiveMixture, lesson: Lesson) -> Tensor:
    """log p of what came, by the mixture."""
    parts = (lesson[rows] for rows in torch.arange(len(lesson)).split(2048))
    return torch.cat(
        [mixture.target_log_probabilities(part.log_base, part.said, part.retrieved, part.targets) for part in parts]
    )


def perplexity(log_probabilities: Tensor) -> float:
    return float(torch.exp(-log_probabilities.double().mean()))


def figures(lesson: Lesson, learned: Learned, model: Pretrained) -> dict[str, Any]:
    """Perplexity per token: the model alone, with kNN-LM, with the mixture, with the gate if there is one."""
    knn = learned.knn.target_log_probabilities(lesson.log_base, lesson.retrieved, lesson.targets)
    return {
        "plain": perplexity(lesson.log_base),
        "knn-lm": perplexity(knn),
        "adaptive": perplexity(mixed(learned.mixture, lesson)),
        **({} if learned.gate is None else {"gate": perplexity(gated(learned.gate, model, lesson))}),
        "tokens": len(lesson),
    }


@torch.no_grad()
def _curve(base: Base, learned: Learned, lessons: Lessons, entries: Entries) -> list[dict[str, float]]:
    """Perplexity of test by the share of positions searched; thresholds are dev's quantiles."""
    lesson, text = lessons.test, lessons.test_text
    on_dev, on_test = (learned.policy(each.said.hidden) for each in (lessons.dev, lesson))
    thresholds = [threshold(on_dev, share) for share in SHARES]
    chosen = [on_test > least for least in thresholds]
    have = [carried_on(lesson.retrieved, each, lesson.targets, text, entries) for each in chosen]
    scores: list[list[Tensor]] = [[] for _ in SHARES]
    with bar("search less", len(lesson)) as shown:
        for rows, said in _said(base, lesson.said.hidden):
            for found, retrieved in zip(scores, have):
                part = retrieved[rows]
                about = lesson.log_base[rows], Said.of(lesson.said.hidden[rows], said, part), part, lesson.targets[rows]
                found.append(learned.mixture.target_log_probabilities(*about))
            shown.advance(len(rows))
    return [
        {
            "wanted": share,
            "threshold": least,
            "searched": float(each.double().mean()),
            "perplexity": perplexity(torch.cat(found)),
        }
        for share, least, each, found in zip(SHARES, thresholds, chosen, scores)
    ]


def carried_on(retrieved: Retrieved, chosen: Tensor, targets: Tensor, text: TokenStream, entries: Entries) -> Retrieved:
    """What positions have when only the chosen ones are searched: the others move on from the one before them."""
    have = Retrieved(retrieved.tokens.clone(), retrieved.distances.clone(), retrieved.ids.clone())
    have.distances[~chosen] = torch.inf
    have.ids[~chosen] = NOTHING
    first = torch.zeros(len(chosen), dtype=torch.bool)
    first[torch.from_numpy(text.begins[text.begins < len(chosen)].astype(np.int64))] = True
    now = chosen.nonzero()[:, 0]
    while len(now := now[now + 1 < len(chosen)] + 1):
        now = now[~chosen[now] & ~first[now]]
        moved = moved_on(have[now - 1], targets[now - 1], entries)
        have.tokens[now], have.distances[now], have.ids[now] = moved.tokens, moved.distances, moved.ids
        now = now[moved.there.any(-1)]
    return have
