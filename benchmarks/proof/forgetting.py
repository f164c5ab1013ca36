"""Part 5: a memory that has forgotten documents beside one that never held them.

Documents are added to a copy of a memory and forgotten again; another copy never holds them. Both have an index of the
same kind, made in the same way. A third memory is made anew without some of the training documents, which a fourth
forgets: their keys are computed again, beside other texts, so they are equal up to rounding only. The membership test
asks whether the documents can be told from ones that were never held by the rank of their true next token.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proof.curves import DomainTexts
from proof.study import Study
from spalm.attachment import Attached
from spalm.compute import Execution
from spalm.corpus import TokenStream
from spalm.generation import Model, load_model
from spalm.memory import Memory, MemorySettings, open_memory, remember, source_of_text
from spalm.neighbours import IndexKind, IndexSettings, make_searcher

_DOCUMENTS, _TOKENS = 8, 96
"""Number of documents that are forgotten, and the number of tokens of each that are compared."""
_KINDS: tuple[IndexKind, ...] = ("exact", "faiss")


def copied(attached: Attached, directory: Path, kind: IndexKind) -> Model:
    """Returns a copy of a model with its memory, with an index of some kind made anew."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(attached.directory, directory, ignore=shutil.ignore_patterns("index*", "SHA256SUMS"))
    return _with_index(directory, kind)


def _with_index(directory: Path, kind: IndexKind) -> Model:
    shutil.rmtree(directory / "index", ignore_errors=True)
    make_searcher(Memory(directory / "memory"), directory / "index", IndexSettings(kind=kind))
    return load_model(directory, Execution().hardware)


def rebuilt_without(attached: Attached, directory: Path, names: list[str], kind: IndexKind) -> Model:
    """Returns a copy of a model whose memory is made anew from the training documents, without some of them."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(attached.directory, directory, ignore=shutil.ignore_patterns("index*", "memory", "SHA256SUMS"))
    encoder = attached.base.encoder
    train = attached.corpus.split("train")
    memory = open_memory(directory / "memory", encoder, MemorySettings(), stream=train)
    for split in ("train", "dev", "test"):
        text = attached.corpus.split(split)
        kept = text.only(~np.isin(np.array(text.names), names))
        remember(memory, encoder, kept, source=source_of_text(kept), execution=Execution())
    return _with_index(directory, kind)


@torch.inference_mode()
def distributions(model: Model, tokens: list[int]) -> Tensor:
    """Returns log p of the whole vocabulary at every token of a text."""
    decoder = model.decoder()
    encoded = decoder.feed([model.tokeniser.start, *tokens[:-1]])
    return decoder.predict(encoded, tokens[-1])[0].log_probabilities


def differences(one: Model, other: Model, texts: list[list[int]]) -> dict[str, Any]:
    """Returns how far the probabilities of two models differ on some texts, and whether they write the same."""
    largest, equal = 0.0, True
    for tokens in texts:
        first, second = distributions(one, tokens), distributions(other, tokens)
        equal = equal and bool(torch.equal(first, second))
        largest = max(largest, float((first.exp() - second.exp()).abs().max()))
    prompts = [one.tokeniser.decode(tokens[:24]) for tokens in texts]
    written = [[model.generate(prompt, max_tokens=24, temperature=0) for model in (one, other)] for prompt in prompts]
    return {
        "equal_to_the_bit": equal,
        "largest_difference_of_a_probability": largest,
        "same_answers": sum(a.text == b.text for a, b in written) / len(written),
        "same_citations": sum(a.citations == b.citations for a, b in written) / len(written),
    }


def ranks(model: Model, texts: list[list[int]]) -> np.ndarray:
    """Returns the rank of the true token at every position of some texts; 1 is the likeliest."""
    found = []
    for tokens in texts:
        scores = distributions(model, tokens)
        own = scores.gather(-1, torch.tensor(tokens)[:, None])
        found.append((1 + (scores > own).sum(-1)).numpy())
    return np.concatenate(found)


def membership(members: np.ndarray, others: np.ndarray) -> float:
    """Returns how often a member's token ranks before another's: 0.5 where they cannot be told apart."""
    ordered = np.sort(others)
    before, upto = (np.searchsorted(ordered, members, side=side) for side in ("left", "right"))
    return float(1 - (before + upto).mean() / 2 / len(ordered))


def summary(found: np.ndarray) -> dict[str, float]:
    """Returns the share of true tokens that rank first, and the median and geometric mean of ranks."""
    return {
        "first": float((found == 1).mean()),
        "median": float(np.median(found)),
        "geometric mean": float(np.exp(np.log(found).mean())),
    }


def added_and_forgotten(study: Study, attached: Attached, texts: list[str], *, kind: IndexKind) -> dict[str, Any]:
    """Returns how a memory that forgot added documents compares with one that never held them."""
    folder = study.directory / "forgetting"
    model, never = copied(attached, folder / f"added-{kind}", kind), copied(attached, folder / f"never-{kind}", kind)
    tokens = [ids[:_TOKENS].tolist() for ids in model.tokeniser.encode([text.encode() for text in texts])]
    secret, apart = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    names = [f"secret {number}" for number in range(len(secret))]
    for name, text in zip(names, texts):
        model.memory.add(name, text)
    held = ranks(model, secret)
    for name in names:
        model.memory.forget(name)
    found = {"held": held, "forgotten": ranks(model, secret), "never held": ranks(never, secret)}
    others = ranks(never, apart)
    return {
        "differences": differences(model, never, secret),
        "ranks": {name: summary(each) for name, each in found.items()},
        "membership": {name: membership(each, others) for name, each in found.items()},
    }


def trained_and_forgotten(study: Study, attached: Attached, *, kind: IndexKind) -> dict[str, Any]:
    """Returns how a memory that forgot training documents compares with one made anew without them."""
    folder, train = study.directory / "forgetting", attached.corpus.split("train")
    model = copied(attached, folder / f"trained-{kind}", kind)
    names = train.names[: _DOCUMENTS // 2]
    rebuilt = rebuilt_without(attached, folder / f"rebuilt-{kind}", names, kind)
    model.store.forget(names)
    return {"differences": differences(model, rebuilt, _beginnings(train, len(names)))}


def _beginnings(stream: TokenStream, count: int) -> list[list[int]]:
    bounds = zip(stream.begins[:count].tolist(), stream.ends[:count].tolist())
    return [stream.tokens[begin : min(end, begin + _TOKENS)].tolist() for begin, end in bounds]


def forgetting(study: Study) -> dict[str, Any]:
    """Returns what is left of forgotten documents in a memory of the first domain."""
    name, core = study.sizes.domains[0], study.sizes.core

    def make() -> dict[str, Any]:
        texts = DomainTexts.of(study, name)
        attached, _ = texts.attach(study, core, None)
        tokens = 2 * _DOCUMENTS * 2000
        documents = texts.domains.held_apart(name, texts.core, tokens, tokeniser=attached.corpus.tokeniser)
        documents = documents[: 2 * _DOCUMENTS]
        found = {
            kind: {
                "added": added_and_forgotten(study, attached, documents, kind=kind),
                "trained": trained_and_forgotten(study, attached, kind=kind),
            }
            for kind in _KINDS
        }
        shutil.rmtree(study.directory / "forgetting", ignore_errors=True)
        return {"memory": name, "documents": _DOCUMENTS, "kinds": found}

    return study.made("forgetting", [name, study.sizes.of_memory], make)
