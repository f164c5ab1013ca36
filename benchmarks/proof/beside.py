"""Part 2: the same documents in a memory, learned by LoRA, and retrieved into the context; and ours on top of either.

LoRA's rank and rate are those that were best on dev. What it is tuned with is not counted as its cost, while kNN-LM's
grid, the mixtures of each source alone and the measuring of test are part of the cost of attaching. As a control, LoRA
that was trained on another domain is measured too: what it gains is not knowledge of the documents.
"""

import shutil
from collections.abc import Iterator
from typing import Any

from proof.costs import document_times, generation_speeds
from proof.curves import DomainTexts
from proof.lora_rows import LoraRows, rows_of_lora
from proof.rag_rows import RagRows
from proof.study import Study
from spalm.attachment import Attached

ANOTHER = "LoRA of another domain, equal cost"
"""Row of the control."""


def opened(study: Study, name: str) -> tuple[DomainTexts, Attached, dict[str, float]]:
    """Returns the texts of a domain, the model with a memory of them, and the time that attaching it took."""
    sizes = study.sizes
    positions = {"positions": sizes.compared_positions, "held_out": sizes.compared_positions}
    texts = DomainTexts.of(study, name, sizes.compared_core, **positions)
    return texts, *texts.attach(study, sizes.compared_core, 0)


def compare(study: Study, name: str) -> dict[str, Any]:
    """Returns the rows of one domain: sums of log p by document of test, costs, speeds; each part of it is kept."""
    texts, attached, clock = opened(study, name)
    rows: dict[str, list[float]] = dict(attached.combiner_artifact.facts["documents"]["test"])
    lora = LoraRows(study, texts, attached)
    runs = lora.trained(clock["core_seconds"])
    rows |= rows_of_lora(lora, runs, rows["tokens"])
    rag = RagRows(study, texts, attached)
    measured = rag.measured()
    rows |= measured["documents"]
    identity = [texts.identity(study), study.sizes.speeds, rag.tried[0]]
    times = study.made(f"documents-{name}", identity, lambda: document_times(study, attached, rag))
    shutil.rmtree(study.directory / "copy", ignore_errors=True)
    return {
        "domain": name,
        "documents": rows,
        "tokens_in_memory": len(attached.corpus.split("train")),
        "attaching": clock,
        "lora": runs,
        "rag": {name: each for name, each in measured.items() if name != "documents"} | {"tried": rag.tried},
        "seconds_of_a_document": times,
        "tokens_per_second": study.made(f"speeds-{name}", identity, lambda: generation_speeds(study, attached, rag)),
    }


def add_control(study: Study, found: dict[str, Any], name: str, *, other: str) -> None:
    """Adds the row of LoRA that was trained on another domain."""
    texts, attached, _ = opened(study, name)
    lora = LoraRows(study, texts, attached)
    found[name]["documents"][ANOTHER] = lora.of_another_domain(found[other]["lora"]["equal"], other)


def beside(study: Study) -> Iterator[dict[str, Any]]:
    """Yields the rows of the domains that are compared so far, after each of them."""
    found: dict[str, Any] = {}
    for name in study.sizes.domains[: study.sizes.compared]:
        found[name] = compare(study, name)
        if len(found) > 1:
            add_control(study, found, name, other=next(iter(found)))
        if len(found) == 2:
            add_control(study, found, next(iter(found)), other=name)
        yield found
