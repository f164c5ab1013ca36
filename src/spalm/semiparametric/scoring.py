"""How well a model with a memory predicts further texts, and how much their own past would help: static and dynamic."""

from pathlib import Path
from typing import Any

from spalm.corpus import TokenStream, tokenise_files
from spalm.engine import LOCAL, Engine
from spalm.errors import InputError
from spalm.memory import Memory, remember, source_of_text
from spalm.semiparametric.adaptive import Lesson
from spalm.semiparametric.attached import Attached
from spalm.semiparametric.attaching import lesson_of, lesson_of_text, mixed, perplexity
from spalm.semiparametric.dynamic import own_past, together
from spalm.semiparametric.knn import Knn


def remember_files(attached: Attached, paths: list[Path], restart: bool = False, engine: Engine = LOCAL) -> Memory:
    """Adds the documents of files and folders to the memory of an attached model."""
    if not paths:
        raise InputError("--text is missing: name the files or folders to remember")
    engine.refuse_unless_seen(attached.base.folder.path / "config.json")
    stream = tokenise_files(paths, attached.corpus.tokeniser)
    remember(attached.memory, attached.base.encoder, stream, source_of_text(stream), restart, engine=engine)
    return attached.memory


def score_files(attached: Attached, paths: list[Path]) -> dict[str, Any]:
    """Perplexity per token of texts that the memory does not hold.

    Dynamic figures are of models that also search what the texts have said so far; nothing is kept of it afterwards.
    """
    text = tokenise_files(paths, attached.corpus.tokeniser)
    if not len(text):
        raise InputError(f"{paths[0]} holds no text to score")
    _refuse_the_remembered(attached, text)
    lesson = lesson_of_text(attached.base, attached.memory, attached.search, text)
    return {
        "tokens": len(text),
        "documents": len(text.names),
        "static": _static(attached, lesson),
        "dynamic": _dynamic(attached, lesson),
    }


def _refuse_the_remembered(attached: Attached, text: TokenStream) -> None:
    held = set(attached.memory.entries().documents_held.names) & set(text.names)
    if held:
        raise InputError(
            f"the memory holds a document called {min(held)!r}: it would be scored by its own copy; forget it first"
        )


def _static(attached: Attached, lesson: Lesson) -> dict[str, float]:
    knn = Knn(**attached.combined.facts["knn"])
    return {
        "plain": perplexity(lesson.log_base),
        "knn-lm": perplexity(knn.target_log_probabilities(lesson.log_base, lesson.retrieved, lesson.targets)),
        "adaptive": perplexity(mixed(attached.mixture, lesson)),
    }


def _dynamic(attached: Attached, lesson: Lesson) -> dict[str, float]:
    settings, hidden = attached.settings, lesson.said.hidden
    keys, tokens = attached.memory.keys_of(hidden), lesson.targets.numpy()
    cache = Knn(**attached.combined.facts["cache"])
    last = own_past(keys, tokens, settings.neighbours, settings.cache)
    retrieved = together(lesson.retrieved, own_past(keys, tokens, settings.neighbours), settings.neighbours)
    grown = lesson_of(attached.base, hidden, retrieved, lesson.targets)
    return {
        "cache": perplexity(cache.target_log_probabilities(lesson.log_base, last, lesson.targets)),
        "growing": perplexity(mixed(attached.mixture, grown)),
    }
