"""Keys of the same text: hidden states at several places of SmolLM2-135M, whole, reduced and projected.

Two domains are cut from the Wikipedia of SPALM_DATA, about 30,000 tokens each for the memory, and dev documents beside
them. Each kind of key is searched exactly. kNN-LM is tuned, and the mixture calibrated, on every other dev document and
measured on the rest, and the other way round, so that no figure is of what it was tuned on. The mixture learns from the
second half of the memory's documents, the projections from the first half: what a projection was fitted to is not what
the mixture takes for new text.

A projection is fitted so that a softmax over distances finds the next token among the entries of other documents:
contexts with the same next token come together. Beside each stands the same number of principal axes, and the one that
was fitted to the other domain.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads wait as the package has them wait

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from footballers import smollm2
from key_states import BEFORE, DOMAINS, EARLIER, FEED_FORWARD, FINAL, DomainStates, PlacesInModel, read_domain
from spalm.attachment.base import PretrainedBase
from spalm.attachment.fitting.examples import examples_with_each
from spalm.attachment.fitting.learning import mixture_log_probabilities
from spalm.attachment.settings import AttachSettings
from spalm.compute import Hardware, has_bf16
from spalm.console import print_json, say
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.errors import InputError
from spalm.files import write_json
from spalm.lm.pretrained import Backend, PretrainedModel, locate_pretrained
from spalm.memory import Projection
from spalm.memory.exact import ExactView, Excluded, reversed_contexts
from spalm.memory.exact.matches import SearchedContexts
from spalm.memory.exact.suffixes import sort_contexts
from spalm.semiparametric import KnnSettings, Matched, Retrieved, TrainingExamples, learn_mixture, tune_knn
from spalm.semiparametric.mixture.adaptive import calibrate

NEIGHBOURS = 256
KNN_LM, MIXTURE = "knn-lm", "mixture"
"""What is measured with each kind of key: nearest contexts alone, and the mixture of these and exact matches."""
_ROWS = 512
"""Queries whose distances are in memory at a time."""
ANCHORS, CANDIDATES = 256, 4096
"""Numbers of positions in a step of fitting a projection that ask, and that are compared."""
_JUDGED, _EVERY = 1024, 40
"""Number of positions of other documents by which a projection is judged, and of steps between."""
_SAMPLES = 2000
"""Number of bootstrap samples of documents."""

KeyFunction = Callable[[DomainStates], Tensor]
"""Makes the keys of all positions of a domain."""


def nearest(
    queries: Tensor, keys: Tensor, own: Tensor, documents: Tensor, count: int = NEIGHBOURS
) -> tuple[Tensor, Tensor]:
    """Returns rows and squared distances of the nearest keys of documents other than each query's own."""
    lengths, found = keys.square().sum(1), []
    for rows in torch.arange(len(queries)).split(_ROWS):
        asked = queries[rows]
        distances = asked.square().sum(1, keepdim=True) - 2 * asked @ keys.T + lengths
        distances[own[rows, None] == documents] = torch.inf
        found.append(distances.clamp_min_(0).topk(count, largest=False))
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])


def neighbour_loss(asked: Tensor, compared: Tensor, same_token: Tensor, same_document: Tensor) -> Tensor:
    """Returns -log of the weight that entries with the right token get in softmax(-distance), for each that has any.

    Entries of the same document are left out, as they are when the memory is searched for new text.
    """
    scores = -torch.cdist(asked, compared).square()
    scores = scores.masked_fill(same_document, -torch.inf)
    right = scores.masked_fill(~same_token, -torch.inf)
    answerable = (same_token & ~same_document).any(1)
    return (scores[answerable].logsumexp(1) - right[answerable].logsumexp(1)).mean()


def fit_projection(
    states: Tensor, targets: Tensor, documents: Tensor, *, width: int, judged: Tensor, steps: int
) -> Projection:
    """Returns a projection fitted to the positions that are not `judged`; it is the best by the judged ones."""
    generator = torch.Generator().manual_seed(1)
    learned, held = (~judged).nonzero()[:, 0], judged.nonzero()[:, 0]
    start = Projection.learn(states[learned].numpy(), width)
    centred = states - torch.from_numpy(start.mean)
    first = centred[learned[:ANCHORS]] @ torch.from_numpy(start.directions)
    spread = torch.cdist(first, first).square().median()
    directions = (torch.from_numpy(start.directions) * (8 / spread).sqrt()).requires_grad_()
    optimiser = torch.optim.Adam([directions], 0.05 * float(directions.detach().std()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def loss(asked: Tensor, compared: Tensor) -> Tensor:
        same_token = targets[asked, None] == targets[compared]
        same_document = documents[asked, None] == documents[compared]
        return neighbour_loss(centred[asked] @ directions, centred[compared] @ directions, same_token, same_document)

    some = held[torch.randperm(len(held), generator=generator)[:_JUDGED]]
    best, kept = float("inf"), directions.detach().clone()
    for step in range(steps + 1):
        if step % _EVERY == 0:
            with torch.no_grad():
                now = float(loss(some, learned))
            if now < best:
                best, kept = now, directions.detach().clone()
        drawn = learned[torch.randperm(len(learned), generator=generator)[:CANDIDATES]]
        optimiser.zero_grad(set_to_none=True)
        loss(drawn[:ANCHORS], drawn).backward()
        optimiser.step()
        schedule.step()
    return Projection(start.mean, kept.numpy())


def joined(domain: DomainStates, places: tuple[str, ...]) -> Tensor:
    """Returns the states of several places side by side, each scaled to the same mean square."""
    parts = [domain.states[place].float() for place in places]
    return torch.cat([part / part[: domain.memory_tokens].square().mean().sqrt() for part in parts], 1)


@dataclass(frozen=True)
class KeyKind:
    """A kind of key."""

    places: tuple[str, ...]
    width: int | None = None
    """Number of dimensions of a projection; None: the states themselves."""
    fitted: str = ""
    """How the projection was made: to principal axes, fitted, or fitted to the other domain."""

    @property
    def name(self) -> str:
        """Name in the table."""
        place = " and ".join(self.places)
        return place if self.width is None else f"{place}, {self.fitted} {self.width}"


KINDS = [
    KeyKind((FINAL,)),
    KeyKind((BEFORE,)),
    KeyKind((FEED_FORWARD,)),
    KeyKind((EARLIER,)),
    KeyKind((FINAL, FEED_FORWARD)),
    *(KeyKind((FINAL,), width, "axes") for width in (128, 64)),
    *(KeyKind((FINAL,), width, "fitted") for width in (128, 64)),
    KeyKind((FINAL,), 128, "fitted elsewhere"),
    KeyKind((FEED_FORWARD,), 128, "fitted"),
    KeyKind((FINAL, FEED_FORWARD), 128, "fitted"),
]


def second_half(domain: DomainStates) -> Tensor:
    """Returns which positions of the memory are in the second half of its documents."""
    return domain.documents[: domain.memory_tokens] >= domain.memory_documents // 2


def projection_for(kind: KeyKind, domain: DomainStates, steps: int) -> Projection:
    """Returns the projection of a kind, made from a domain's memory."""
    assert kind.width is not None
    held = domain.memory_tokens
    states = joined(domain, kind.places)[:held]
    if kind.fitted == "axes":
        return Projection.learn(states.numpy(), kind.width)
    judged = second_half(domain)
    targets, documents = domain.targets[:held], domain.documents[:held]
    return fit_projection(states, targets, documents, width=kind.width, judged=judged, steps=steps)


def keys_of(kind: KeyKind, domain: DomainStates, fitted: Projection | None) -> Tensor:
    """Returns the keys of all positions of a domain, rounded as a memory stores them."""
    states = joined(domain, kind.places)
    return (states if fitted is None else fitted(states)).half().float()


def with_neighbours(domain: DomainStates, keys: Tensor, rows: Tensor) -> Retrieved:
    """Returns the neighbours of some positions in the memory, of documents other than their own."""
    held = domain.memory_tokens
    ids, distances = nearest(keys[rows], keys[:held], domain.documents[rows], domain.documents[:held])
    return Retrieved(domain.targets[ids], distances, ids)


def matches_of(domain: DomainStates, rows: Tensor, vocabulary: int) -> Matched:
    """Returns the exact matches of some positions in the memory, of documents other than their own."""
    text, count = domain.text, domain.memory_documents
    begins, ends = text.begins[:count], text.ends[:count]
    contexts = sort_contexts(text.tokens[: ends[-1]], ends - begins, begins, vocabulary=vocabulary)
    own = text.documents_of(rows.numpy())
    excluded = Excluded(text.begins[own], text.ends[own])
    return Matched.of(ExactView([SearchedContexts(contexts)]).find(reversed_contexts(text, rows.numpy()), excluded))


def measured(train: TrainingExamples, dev: TrainingExamples, halves: Tensor, *, knn: bool) -> Tensor:
    """Returns log p of every dev token by kNN-LM or the mixture, tuned on the half of dev that it is not in."""
    found = torch.empty(len(dev))
    learned = None if knn else learn_mixture(AttachSettings().adaptive, train)
    for half in (True, False):
        tuned, asked = (rows.nonzero()[:, 0] for rows in (halves != half, halves == half))
        here, there = dev[tuned], dev[asked]
        if learned is None:
            best, _ = tune_knn(here.log_base, here.retrieved, here.targets, settings=KnnSettings())
            found[asked] = best.target_log_probabilities(there.log_base, there.retrieved, there.targets)
        else:
            found[asked] = mixture_log_probabilities(calibrate(copy.deepcopy(learned), here), there)
    return found


def interval(gains: Tensor, documents: Tensor) -> list[float]:
    """Returns a 95% interval of a mean gain per token in nats, by bootstrap over documents."""
    _, which = documents.unique(return_inverse=True)
    count = int(which.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, which, gains.double())
    lengths = torch.bincount(which, minlength=count).double()
    drawn = torch.from_numpy(np.random.default_rng(1).integers(0, count, (_SAMPLES, count)))
    means = sums[drawn].sum(1) / lengths[drawn].sum(1)
    return [float(means.quantile(share)) for share in (0.025, 0.975)]


def perplexity(log_probabilities: Tensor) -> float:
    """Returns the perplexity per token."""
    return float(torch.exp(-log_probabilities.double().mean()))


def study(
    domain: DomainStates, base: PretrainedBase, projections: dict[KeyKind, Projection], kinds: list[KeyKind]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the figures of one domain without a memory, and with every kind of key; the first is the default."""
    held, documents = domain.memory_tokens, domain.documents
    train_rows, dev_rows = second_half(domain).nonzero()[:, 0], torch.arange(held, len(documents))
    searched: list[list[Retrieved]] = [[], []]
    matched = [matches_of(domain, rows, base.model.vocabulary) for rows in (train_rows, dev_rows)]
    for kind in kinds:
        keys = keys_of(kind, domain, projections.get(kind))
        for each, rows, exact in zip(searched, (train_rows, dev_rows), matched):
            each.append(replace(with_neighbours(domain, keys, rows), matched=exact))
    examples = [
        examples_with_each(base, domain.states[FINAL][rows].float(), each, targets=domain.targets[rows])
        for rows, each in zip((train_rows, dev_rows), searched)
    ]
    halves, of_dev = documents[dev_rows] % 2 == 0, documents[dev_rows]
    yield "no memory", {MIXTURE: perplexity(examples[1][0].log_base), "tokens": len(dev_rows)}
    default: dict[str, Tensor] = {}
    for kind, train, dev in zip(kinds, *examples):
        begun = time.perf_counter()
        scores = {name: measured(train, dev, halves, knn=name == KNN_LM) for name in (KNN_LM, MIXTURE)}
        default = default or scores
        first = dev.retrieved.tokens[:, 0] == dev.targets
        found = {
            "width": kind.width or sum(domain.states[place].shape[1] for place in kind.places),
            "first neighbour right": float(first.double().mean()),
            "first neighbour right, memory": float((train.retrieved.tokens[:, 0] == train.targets).double().mean()),
            **{name: perplexity(each) for name, each in scores.items()},
            "nats gained over the default": {
                name: interval(each - default[name], of_dev) for name, each in scores.items()
            },
        }
        yield kind.name, found
        say(f"{domain.name}: {kind.name}: {found[MIXTURE]:.3f}, {time.perf_counter() - begun:.0f} s")


def all_projections(domains: list[DomainStates], steps: int) -> list[dict[KeyKind, Projection]]:
    """Returns the projections of each domain: its own, and those that were fitted to the next domain."""
    made: list[dict[KeyKind, Projection]] = [{} for _ in domains]
    for kind in KINDS:
        if kind.width is None or kind.fitted == "fitted elsewhere":
            continue
        for domain, own in zip(domains, made):
            own[kind] = projection_for(kind, domain, steps)
            say(f"{domain.name}: {kind.name}")
    for kind in (kind for kind in KINDS if kind.fitted == "fitted elsewhere"):
        for number, own in enumerate(made):
            own[kind] = made[(number + 1) % len(made)][replace(kind, fitted="fitted")]
    return made


def main() -> None:
    """Reads the domains, fits the projections, measures every kind of key, and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/keys.json"))
    parser.add_argument("--model", help="instead of SmolLM2-135M")
    parser.add_argument("--tokens", type=int, default=30_000, help="tokens of each memory")
    parser.add_argument("--dev", type=int, default=8_000, help="tokens of each dev text")
    parser.add_argument("--steps", type=int, default=400, help="steps of fitting a projection")
    given = parser.parse_args()
    data = os.environ.get("SPALM_DATA")
    if not data or not (Path(data) / "wikipedia").is_dir():
        raise InputError("SPALM_DATA does not name a folder with wikipedia/train.txt.gz")
    folder = locate_pretrained(given.model or str(smollm2()), given.out.with_suffix("") / "model")
    backend = Backend("torch", "bfloat16" if has_bf16() else "float32")
    base = PretrainedBase(folder, folder.digest(), Hardware("cpu"), 1024, 768, backend)
    tokeniser, model = PretrainedTokeniser.of_model(folder.path), base.model
    assert isinstance(model, PretrainedModel)
    sizes, places = (given.tokens, given.dev), PlacesInModel(model)
    work = given.out.with_suffix("")
    domains = [read_domain(name, places, tokeniser, data=Path(data), tokens=sizes, work=work) for name in DOMAINS]
    made = all_projections(domains, given.steps)
    result: dict[str, Any] = {
        "read by": str(backend),
        "cores": os.cpu_count(),
        "steps": given.steps,
        "neighbours": NEIGHBOURS,
    }
    for domain, projections in zip(domains, made):
        result[domain.name] = {}
        for name, figures in study(domain, base, projections, KINDS):
            result[domain.name][name] = figures
            write_json(given.out, result)
    print_json(result)


if __name__ == "__main__":
    main()
