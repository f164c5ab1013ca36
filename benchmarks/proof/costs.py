"""Costs in use: seconds to add a document and to forget it, and tokens per second, of a memory and of retrieval."""

import statistics
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

import spalm
from generation_systems import TOKENS, WARM_UP, System, continue_prompts, medians, ours, prompts_of
from proof.copies import copied
from proof.rag import PassageRetriever, Passages
from proof.rag_rows import RagRows
from proof.study import Clock, Study
from spalm.attachment import Attached
from spalm.compute import Execution, Hardware
from spalm.corpus import TokenStream
from spalm.generation import Model

_CONTEXT = 2048
"""Number of tokens of prompt and answer where the model can read any number."""

Times = dict[str, float]
"""Median, lowest and highest number of seconds."""


def seconds_of(work: Callable[[], object]) -> float:
    """Returns how long some work takes."""
    clock = Clock()
    with clock.running():
        work()
    return clock.seconds


def spread(seconds: list[float]) -> Times:
    """Returns the median and the range of some times."""
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def document_times(study: Study, attached: Attached, rag: RagRows) -> dict[str, Times]:
    """Returns the seconds that adding one document and forgetting it take, over several documents of test.

    In a copy of the memory; in our own index of passages, which takes in one document at the next question; and in the
    index of RAG, which is made anew, with texts that are kept decoded.
    """
    test, tokeniser = attached.corpus.split("test"), attached.corpus.tokeniser
    bounds = list(zip(test.begins.tolist(), test.ends.tolist()))[: study.sizes.speeds]
    folder = study.directory / "copy"
    model = copied(attached.directory, folder, "faiss", execution=study.execution)
    model.memory.add("warm-up", tokeniser.decode(test.tokens[:50].tolist()))
    model.memory.forget("warm-up")
    model.passages("warm-up")
    found: dict[str, list[float]] = {name: [] for name in ("add", "index_added", "forget", "index_forgot", "rag_index")}
    for number, (begin, end) in enumerate(bounds):
        name, text = f"added {number}", tokeniser.decode(test.tokens[begin:end].tolist())
        found["add"].append(seconds_of(lambda name=name, text=text: model.memory.add(name, text)))
        found["index_added"].append(seconds_of(lambda text=text: model.passages(text[:200], count=1)))
        found["forget"].append(seconds_of(lambda name=name: model.memory.forget(name)))
        found["index_forgot"].append(seconds_of(lambda text=text: model.passages(text[:200], count=1)))
        document = TokenStream(test.tokens[begin:end], np.array([end - begin]), lambda: ["one"], start=test.start)
        found["rag_index"].append(seconds_of(lambda document=document: _indexed_with(rag, document)))
    return {name: spread(seconds) for name, seconds in found.items()}


def _indexed_with(rag: RagRows, document: TokenStream) -> PassageRetriever:
    """Returns RAG's index with the passages of another document."""
    tokeniser = rag.tokeniser
    return PassageRetriever(rag.passages.plus(Passages.of(document, tokeniser)), tokeniser, rag.best)


def generation_speeds(study: Study, attached: Attached, rag: RagRows) -> dict[str, float]:
    """Returns tokens per second: the model alone, as LoRA is too once merged, with passages, and with the memory.

    Where llama.cpp can run the model, with it too; it cannot run LoRA as it was trained here.
    """
    model, retriever = study.load(attached), rag.retriever(rag.best)
    systems = {
        "plain": ours(model, use_memory=False),
        "RAG": _after_passages(model, retriever),
        "ours": ours(model, use_memory=True),
        "RAG with the memory": _after_passages(model, retriever, use_memory=True),
    }
    if attached.base.folder.gguf is not None and find_spec("llama_cpp") is not None:
        by_llama = spalm.load(attached.directory, execution=Execution(Hardware(backend="llama")))
        systems["plain, llama.cpp"] = ours(by_llama, use_memory=False)
        systems["ours, llama.cpp"] = ours(by_llama, use_memory=True)
    count = study.sizes.speeds + WARM_UP
    prompts = [each for split in ("test", "dev") for each in prompts_of(attached.corpus.split(split), count)]
    return medians(continue_prompts(systems, (prompts * count)[:count]))


def _after_passages(model: Model, retriever: PassageRetriever, *, use_memory: bool = False) -> System:
    """Returns a system that retrieves passages for a prompt and continues it after them."""
    alone, room = ours(model, use_memory=use_memory), (model.max_length or _CONTEXT) - TOKENS
    return lambda prompt: alone(retriever.prompt(prompt[1:], prompt[0], room=room))
