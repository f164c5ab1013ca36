"""Part 2: the same documents in a memory, learned by LoRA, and retrieved into the context; and ours on top of either.

LoRA's rank and rate are those that were best on dev with the core-seconds that attaching took. With these its budget is
then doubled as long as dev improves. What it is tuned with is not counted as its cost, as kNN-LM's grid and the
mixture's calibration are part of the cost of attaching.
"""

import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generation_systems import TOKENS, WARM_UP, System, continue_prompts, ours, prompts_of
from proof.curves import DomainTexts
from proof.lora import LoraSettings, train_lora
from proof.rag import PassageRetriever, RagSettings, read_with_passages, tune_rag
from proof.scores import search_of_training
from proof.study import Clock, Study
from spalm.attachment import Attached
from spalm.attachment.fitting.examples import examples_from_hidden, held_out_text
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.fitting.measuring import sums_by_document
from spalm.corpus import TokenStream
from spalm.generation import Model
from spalm.memory.exact import reversed_contexts
from spalm.semiparametric import TrainingExamples
from spalm.semiparametric.mixture.adaptive import calibrate

_CONTEXT = 2048
"""Number of tokens of prompt and answer where the model can read any number."""
_ENOUGH = 1e-3
"""Loss in nats by which LoRA must improve on dev for its budget to be doubled again."""


def held_out(attached: Attached, split: Any) -> TokenStream:
    """Returns the text of dev or test that the figures of a memory are measured on."""
    return held_out_text(attached.corpus.split(split), attached.settings)[0]


def lora_runs(study: Study, name: str, attached: Attached, *, budget: float) -> dict[str, Any]:
    """Trains LoRA with every setting at equal cost, then with the best one as long as more of it helps."""
    sizes, train = study.sizes, attached.corpus.split("train")
    dev, base = held_out(attached, "dev"), attached.base.folder.path
    folder = study.directory / "lora"

    def run(settings: LoraSettings, seconds: float, out: Path | None) -> dict[str, Any]:
        identity = [asdict(settings), seconds, sizes.of_memory]
        title = f"lora-{name}-{settings.rank}-{settings.rate:g}-{seconds:.0f}{'' if out is None else '-kept'}"
        train_it = partial(train_lora, base, train, dev, settings=settings, budget=seconds, out=out)
        return study.made(title, identity, lambda: asdict(train_it()))

    tried = [run(LoraSettings(rank, rate), budget, None) for rank in sizes.ranks for rate in sizes.rates]
    best = LoraSettings(**min(tried, key=lambda each: each["dev"])["settings"])
    kept = {"equal": run(best, budget, folder / f"{name}-equal")}
    longest, seconds = kept["equal"], budget
    for _ in range(sizes.doublings):
        seconds *= 2
        further = run(best, seconds, folder / f"{name}-{seconds:.0f}")
        if further["dev"] > longest["dev"] - _ENOUGH:
            break
        longest = further
    kept["until it stops"] = longest
    place = folder / f"{name}-{longest['budget']:.0f}" if longest is not kept["equal"] else folder / f"{name}-equal"
    return {"tried": tried, **kept, "folders": {"equal": str(folder / f"{name}-equal"), "until it stops": str(place)}}


def _with_memory(attached: Attached, text: TokenStream, hidden: Tensor) -> TrainingExamples:
    """Returns the positions of a text whose hidden states are known, with what the memory has for them."""
    search = search_of_training(attached)
    positions = np.arange(len(text))
    retrieved = search(search.memory.keys_of(hidden), reversed_contexts(text, positions))
    targets = torch.from_numpy(text.targets(positions))
    return examples_from_hidden(attached.base, hidden, retrieved, targets=targets)


def rag_rows(study: Study, attached: Attached) -> dict[str, Any]:
    """Returns the sums of log p of in-context retrieval, and of the memory on top of it, and what both took.

    The mixture is the memory's own, calibrated on dev read with passages.
    """
    base, tokeniser, train = attached.base, attached.corpus.tokeniser, attached.corpus.split("train")
    dev, test = held_out(attached, "dev"), held_out(attached, "test")
    sizes, tuned_on = study.sizes, dev.beginning(min(len(dev), study.sizes.retriever_tokens))
    tried = tune_rag(base, train, tuned_on, tokeniser=tokeniser, tried=sizes.retrievers)
    best = RagSettings(**{name: value for name, value in tried[0].items() if name != "mean_log_p"})
    retriever = PassageRetriever(train, tokeniser, best)
    on_dev, _ = read_with_passages(base, dev, retriever, title="RAG: dev")
    clock = Clock()
    with clock.running():
        on_test, read = read_with_passages(base, test, retriever, title="RAG: test")
    examples = _with_memory(attached, test, on_test)
    mixture = calibrate(copy.deepcopy(attached.mixture), _with_memory(attached, dev, on_dev))
    rows = {"RAG": examples.log_base, "RAG with the memory": mixture_log_probabilities(mixture, examples)}
    return {
        "tried": tried,
        "documents": sums_by_document({"plain": examples.log_base, **rows}, test),
        "index_core_seconds": retriever.core_seconds,
        "read_per_token": read / len(test),
        "clock": asdict(clock),
    }


def document_times(study: Study, attached: Attached) -> dict[str, float]:
    """Returns the seconds that adding one document and forgetting it take: in the memory, and in the index of RAG."""
    test, tokeniser = attached.corpus.split("test"), attached.corpus.tokeniser
    text = tokeniser.decode(test.tokens[: test.ends[0]].tolist())
    model = study.load(attached)
    model.memory.add("warm-up", text[:200])
    model.memory.forget("warm-up")
    times = {"tokens": float(test.ends[0])}
    for name, change in (
        ("add", lambda: model.memory.add("added", text)),
        ("forget", lambda: model.memory.forget("added")),
    ):
        clock = Clock()
        with clock.running():
            change()
        times[name] = clock.seconds
    clock = Clock()
    with clock.running():
        PassageRetriever(attached.corpus.split("train"), tokeniser, RagSettings())
    return {**times, "rag_index": clock.seconds}


def generation_speeds(study: Study, attached: Attached) -> dict[str, float]:
    """Returns tokens per second: the model alone, as LoRA is too once merged, with passages, and with the memory."""
    model = study.load(attached)
    retriever = PassageRetriever(attached.corpus.split("train"), attached.corpus.tokeniser, RagSettings())
    systems = {
        "plain": ours(model, use_memory=False),
        "RAG": _after_passages(model, retriever),
        "ours": ours(model, use_memory=True),
        "RAG with the memory": _after_passages(model, retriever, use_memory=True),
    }
    count = study.sizes.speeds + WARM_UP
    prompts = [each for split in ("test", "dev") for each in prompts_of(attached.corpus.split(split), count)]
    return continue_prompts(systems, (prompts * count)[:count])


def _after_passages(model: Model, retriever: PassageRetriever, *, use_memory: bool = False) -> System:
    """Returns a system that retrieves passages for a prompt and continues it after them."""
    alone = ours(model, use_memory=use_memory)

    def generate(prompt: list[int]) -> int:
        above = [token for passage in retriever.best(prompt[1:]) for token in passage.tolist()]
        room = (model.max_length or _CONTEXT) - TOKENS - len(prompt)
        return alone([prompt[0], *above[max(0, len(above) - room) :], *prompt[1:]])

    return generate


def compare(study: Study, name: str) -> dict[str, Any]:
    """Returns the rows of one domain: sums of log p by document of test, costs, speeds."""
    sizes, texts = study.sizes, DomainTexts.of(study, name)
    attached, clock = texts.attach(study, sizes.core, None)
    rows: dict[str, list[float]] = dict(attached.combiner_artifact.facts["documents"]["test"])
    lora = lora_runs(study, name, attached, budget=clock["core_seconds"])
    on_lora = {}
    for row, folder in (("LoRA, equal cost", "equal"), ("LoRA, until it stops", "until it stops")):
        place = Path(lora["folders"][folder])
        settings = study.settings(keys=sizes.core)
        if str(place) not in on_lora:
            on_lora[str(place)] = study.attach(f"{place.name}-lora", [texts.core], settings, model=place)[0]
        own = on_lora[str(place)].combiner_artifact.facts["documents"]["test"]
        assert own["tokens"] == rows["tokens"], "both are measured on the same documents"
        rows[row], rows[f"{row}, with the memory"] = own["plain"], own["adaptive"]
    rag = study.made(
        f"rag-{name}",
        [name, sizes.of_memory, sizes.retrievers, sizes.retriever_tokens],
        lambda: rag_rows(study, attached),
    )
    rows |= {row: sums for row, sums in rag["documents"].items() if row not in ("tokens", "plain")}
    return {
        "domain": name,
        "documents": rows,
        "tokens_in_memory": len(attached.corpus.split("train")),
        "attaching": clock,
        "lora": lora,
        "rag": {key: value for key, value in rag.items() if key != "documents"},
        "seconds_of_a_document": document_times(study, attached),
        "tokens_per_second": generation_speeds(study, attached),
    }


def beside(study: Study) -> dict[str, Any]:
    """Returns the rows of the domains that are compared."""
    sizes = study.sizes
    tuned = [sizes.ranks, sizes.rates, sizes.doublings, sizes.retrievers, sizes.retriever_tokens]
    shared = [sizes.of_memory, tuned, sizes.speeds]
    return {
        name: study.made(f"beside-{name}", [name, shared], lambda name=name: compare(study, name))
        for name in sizes.domains[: sizes.compared]
    }
