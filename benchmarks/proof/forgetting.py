"""Part 5: a memory that has forgotten documents beside one that never held them.

Documents are added to a copy of a memory and forgotten again; another copy never holds them. Both have an index of the
same kind, made in the same way. A third memory is made anew without some of the training documents, which a fourth
forgets: their keys are computed again, beside other texts, so they are equal up to rounding only, and both have the
mixture that learned from these documents too. The membership test asks whether the documents can be told from ones that
were never held (membership.py).
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proof.copies import copied, copy_folder
from proof.curves import DomainTexts
from proof.membership import MembershipTest, Ranks
from proof.study import SEED, Study
from spalm.attachment import Attached
from spalm.compute import Execution
from spalm.corpus import TokenStream
from spalm.generation import Answer, Model
from spalm.memory import MemorySettings, open_memory, remember, source_of_text
from spalm.neighbours import IndexKind

_TOKENS = 256
"""Number of tokens of each document that are compared."""
_ANSWERS = 8
"""Number of documents whose beginnings are continued."""
_KINDS: tuple[IndexKind, ...] = ("exact", "faiss")

Texts = list[list[int]]
"""The tokens of some documents."""


@dataclass(frozen=True)
class ForgettingData:
    """What both kinds of index are tested with."""

    added: list[str]
    """Documents that are added and forgotten."""
    trained: list[str]
    """Names of training documents that are forgotten."""
    others: list[str]
    """Documents that are never held."""


def rebuild_without(attached: Attached, directory: Path, names: list[str], *, execution: Execution) -> Path:
    """Makes a copy of a model whose memory is made anew from the same texts, without some training documents."""
    if directory.exists():
        return directory
    unfinished = directory.with_name(directory.name + ".unfinished")
    copy_folder(attached.directory, unfinished, without=("memory",))
    encoder = attached.base.encoder
    memory = open_memory(unfinished / "memory", encoder, MemorySettings(), stream=attached.corpus.split("train"))
    for split in ("train", "dev", "test"):
        text = attached.corpus.split(split)
        kept = text.only(~np.isin(np.array(text.names), names))
        remember(memory, encoder, kept, source=source_of_text(kept), execution=execution)
    unfinished.rename(directory)
    return directory


@torch.inference_mode()
def distributions(model: Model, tokens: list[int]) -> Tensor:
    """Returns log p of the whole vocabulary at every token of a text."""
    decoder = model.decoder()
    encoded = decoder.feed([model.tokeniser.start, *tokens[:-1]])
    return decoder.predict(encoded, tokens[-1])[0].log_probabilities


def ranks_of(scores: Tensor, tokens: list[int]) -> np.ndarray:
    """Returns the rank of the true token at every position of a text."""
    own = scores.gather(-1, torch.tensor(tokens)[:, None])
    return (1 + (scores > own).sum(-1)).numpy()


def ranks(model: Model, texts: Texts) -> list[np.ndarray]:
    """Returns the ranks of the true tokens of some texts."""
    return [ranks_of(distributions(model, tokens), tokens) for tokens in texts]


def cited_places(answer: Answer) -> list[Any]:
    """Returns what is cited where in an answer, without the weights, which rounding changes, and the memory's name."""
    return [
        (each.start, each.end, [(source.document, source.offset) for source in each.sources])
        for each in answer.citations
    ]


def compared(one: Model, other: Model, texts: Texts) -> tuple[dict[str, Any], list[np.ndarray], list[np.ndarray]]:
    """Returns how far two models differ on some texts, and the ranks of the true tokens by each of them."""
    largest, equal, first_ranks, second_ranks = 0.0, True, [], []
    for tokens in texts:
        first, second = distributions(one, tokens), distributions(other, tokens)
        equal = equal and bool(torch.equal(first, second))
        largest = max(largest, float((first.exp() - second.exp()).abs().max()))
        first_ranks.append(ranks_of(first, tokens))
        second_ranks.append(ranks_of(second, tokens))
    prompts = [one.tokeniser.decode(tokens[:24]) for tokens in texts[:_ANSWERS]]
    written = [[model.generate(prompt, max_tokens=24, temperature=0) for model in (one, other)] for prompt in prompts]
    differences = {
        "equal_to_the_bit": equal,
        "largest_difference_of_a_probability": largest,
        "same_answers": sum(a.text == b.text for a, b in written) / len(written),
        "same_citations": sum(cited_places(a) == cited_places(b) for a, b in written) / len(written),
    }
    return differences, first_ranks, second_ranks


def summary(found: Ranks) -> dict[str, float]:
    """Returns the share of true tokens that rank first, and the median and geometric mean of ranks."""
    together = np.concatenate(found)
    return {
        "first": float((together == 1).mean()),
        "median": float(np.median(together)),
        "geometric mean": float(np.exp(np.log(together).mean())),
    }


def tested(states: dict[str, Ranks], others: Ranks, *, never: str) -> dict[str, Any]:
    """Returns the ranks and the membership test of states of some documents; `never` is the one of not being held."""
    test = MembershipTest(states, others, SEED)
    return {
        state: {
            **summary(found),
            "membership": asdict(test.area(state)),
            "beyond never held": asdict(test.difference(state, never)),
        }
        for state, found in states.items()
    }


def _tokens_of(model: Model, texts: list[str]) -> Texts:
    return [ids[:_TOKENS].tolist() for ids in model.tokeniser.encode([text.encode() for text in texts])]


def added_and_forgotten(study: Study, attached: Attached, data: ForgettingData, *, kind: IndexKind) -> dict[str, Any]:
    """Returns how a memory that forgot added documents compares with one that never held them."""
    folder, execution = study.directory / "forgetting", study.execution
    model = copied(attached.directory, folder / f"added-{kind}", kind, execution=execution)
    never = copied(attached.directory, folder / f"never-{kind}", kind, execution=execution)
    secret, names = _tokens_of(model, data.added), [f"secret {number}" for number in range(len(data.added))]
    for name, tokens in zip(names, secret):
        model.memory.add(name, model.tokeniser.decode(tokens))
    held = ranks(model, secret)
    for name in names:
        model.memory.forget(name)
    differences, forgotten, of_never = compared(model, never, secret)
    states: dict[str, Ranks] = {"held": held, "forgotten": forgotten, "never held": of_never}
    others = ranks(never, _tokens_of(never, data.others))
    return {"differences": differences, "states": tested(states, others, never="never held")}


def trained_and_forgotten(
    study: Study, attached: Attached, data: ForgettingData, *, rebuilt: Path, kind: IndexKind
) -> dict[str, Any]:
    """Returns how a memory that forgot training documents compares with one made anew without them."""
    folder, execution = study.directory / "forgetting", study.execution
    model = copied(attached.directory, folder / f"trained-{kind}", kind, execution=execution)
    without = copied(rebuilt, folder / f"rebuilt-{kind}", kind, execution=execution)
    texts = _beginnings(attached.corpus.split("train"), data.trained)
    held = ranks(model, texts)
    model.store.forget(data.trained)
    differences, forgotten, of_rebuilt = compared(model, without, texts)
    states: dict[str, Ranks] = {"held": held, "forgotten": forgotten, "made anew without": of_rebuilt}
    others = ranks(without, _tokens_of(without, data.others))
    return {"differences": differences, "states": tested(states, others, never="made anew without")}


def _beginnings(stream: TokenStream, names: list[str]) -> Texts:
    chosen = stream.only(np.isin(np.array(stream.names), names))
    bounds = zip(chosen.begins.tolist(), chosen.ends.tolist())
    return [chosen.tokens[begin : min(end, begin + _TOKENS)].tolist() for begin, end in bounds]


def forgetting(study: Study) -> Iterator[dict[str, Any]]:
    """Yields what is left of forgotten documents in a memory of the first domain, after each kind of index."""
    sizes, folder = study.sizes, study.directory / "forgetting"
    texts = DomainTexts.of(study, sizes.domains[0])
    attached, _ = texts.attach(study, sizes.core, 0)
    apart = texts.domains.held_apart(texts.name, texts.core, 2 * sizes.forgotten)
    trained = attached.corpus.split("train").names[: sizes.forgotten]
    data = ForgettingData(apart[: len(apart) // 2], trained, apart[len(apart) // 2 :])

    def rebuilt() -> Path:
        return rebuild_without(attached, folder / "rebuilt", trained, execution=study.execution)

    found: dict[str, Any] = {}
    for kind in _KINDS:
        identity = [texts.identity(study), asdict(data), kind]
        found[kind] = {
            "added": study.made(
                f"forgetting-added-{kind}",
                identity,
                lambda kind=kind: added_and_forgotten(study, attached, data, kind=kind),
            ),
            "trained": study.made(
                f"forgetting-trained-{kind}",
                identity,
                lambda kind=kind: trained_and_forgotten(study, attached, data, rebuilt=rebuilt(), kind=kind),
            ),
        }
        yield {"memory": texts.name, "documents": len(data.added), "trained": len(trained), "kinds": found}
    shutil.rmtree(folder, ignore_errors=True)
