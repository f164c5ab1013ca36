"""Scoring further texts with an attached model, with the memory as it is (static) and with their own past (dynamic)."""

from pathlib import Path
from typing import Any

from spalm.attachment.attached import Attached
from spalm.attachment.dynamic import merge_nearest, nearest_in_past
from spalm.attachment.fitting.examples import examples_from_hidden, examples_from_text
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.fitting.measuring import perplexity
from spalm.compute import Execution
from spalm.corpus import TokenStream, tokenise_files
from spalm.errors import InputError
from spalm.memory import Memory, remember, source_of_text
from spalm.semiparametric import Knn, TrainingExamples


def remember_files(attached: Attached, paths: list[Path], execution: Execution) -> Memory:
    """Adds the documents of files and folders to the memory of an attached model."""
    if not paths:
        raise InputError("--text is missing: name the files or folders to remember")
    execution.engine.refuse_unless_visible(attached.base.folder.path / "config.json")
    stream = tokenise_files(paths, attached.corpus.tokeniser)
    remember(attached.memory, attached.encoder_of_documents, stream, source=source_of_text(stream), execution=execution)
    return attached.memory


def score_files(attached: Attached, paths: list[Path]) -> dict[str, Any]:
    """Returns the perplexity per token of texts that the memory does not hold.

    For the dynamic figures the texts' own past is searched as well, if the memory has keys. Nothing of the texts is
    kept.
    """
    text = tokenise_files(paths, attached.corpus.tokeniser)
    _refuse_remembered(attached, text)
    examples = examples_from_text(attached.base, attached.memory_search, text)
    found = {"tokens": len(text), "documents": len(text.names), "static": _static(attached, examples)}
    return {**found, "dynamic": _dynamic(attached, examples)} if attached.has_keys else found


def _refuse_remembered(attached: Attached, text: TokenStream) -> None:
    """Refuses texts that the memory holds."""
    held = set(attached.memory.entries().live_documents.names) & set(text.names)
    if held:
        raise InputError(
            f"the memory holds a document called {min(held)!r}: it would be scored by its own copy; forget it first"
        )


def _static(attached: Attached, examples: TrainingExamples) -> dict[str, float]:
    """Returns the perplexities with the memory as it is."""
    found = {"plain": perplexity(examples.log_base)}
    if attached.has_keys:
        knn = Knn(**attached.combiner_artifact.facts["knn"])
        mixed = knn.target_log_probabilities(examples.log_base, examples.retrieved, examples.targets)
        found["knn-lm"] = perplexity(mixed)
    return {**found, "adaptive": perplexity(mixture_log_probabilities(attached.mixture, examples))}


def _dynamic(attached: Attached, examples: TrainingExamples) -> dict[str, float]:
    """Returns the perplexities when the past of the texts themselves is searched, too."""
    settings, hidden = attached.settings, examples.base.hidden
    keys, tokens, count = attached.memory.keys_of(hidden), examples.targets.numpy(), settings.neighbours
    cache = Knn(**attached.combiner_artifact.facts["cache"])
    last = nearest_in_past(keys, tokens, count, reach=settings.cache)
    retrieved = merge_nearest(examples.retrieved, nearest_in_past(keys, tokens, count), count)
    grown = examples_from_hidden(attached.base, hidden, retrieved, targets=examples.targets)
    return {
        "cache": perplexity(cache.target_log_probabilities(examples.log_base, last, examples.targets)),
        "growing": perplexity(mixture_log_probabilities(attached.mixture, grown)),
    }
