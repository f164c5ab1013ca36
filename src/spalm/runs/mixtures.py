"""Mixtures on top of a model's records: kNN-LM's fixed weight, or the adaptive one.

Both are made from records and neighbours that are on disk, without reading the text again. What is tuned on dev is
saved with the result.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spalm.artifact import Draft
from spalm.console import bar
from spalm.corpus import Corpus, Split, TokenSplit
from spalm.errors import InputError
from spalm.neighbours import NeighbourTable
from spalm.runs.evaluation import matcher_of
from spalm.runs.records import Records, records_stage
from spalm.runs.rows import HELD_OUT, HeldOut, Source
from spalm.semiparametric import Knn, Retrieved, Retriever, TrainingExamples, tune_knn
from spalm.semiparametric.knn import KnnSettings
from spalm.semiparametric.mixture.adaptive import PARAMETER_FORMAT, AdaptiveMixture, AdaptiveSettings, learn_mixture
from spalm.training import load_network
from spalm.training.checkpoint import save_tensors

MIXTURE = "mixture.safetensors"
"""File of the mixture that learned from all of dev; it scores test."""
BY_HALF = ("mixture-first.safetensors", "mixture-second.safetensors")
"""Files of the mixtures that score the halves of dev; each learned from the other half."""
_ROWS = 1 << 15
"""Positions that are mixed at a time."""
_MOST = 150_000
"""Highest number of positions that a mixture learns from."""


@dataclass(frozen=True)
class _ScoredPositions:
    """Positions of dev and test with a model's scores and their neighbours."""

    records: Records
    corpus: Corpus
    retrievers: dict[HeldOut, Retriever]

    @classmethod
    def open(
        cls, records: Records, corpus: Corpus, table: NeighbourTable, *, count: int, matches: bool = False
    ) -> "_ScoredPositions":
        """Opens all positions of dev and test, with `count` neighbours of each, and their exact matches if asked."""
        matchers = {split: matcher_of(table, corpus, split) if matches else None for split in HELD_OUT}
        return cls(
            records, corpus, {split: Retriever(table, split, count, matcher=matchers[split]) for split in HELD_OUT}
        )

    def knn_inputs(self, split: HeldOut, rows: Int[np.ndarray, "n"]) -> tuple[Tensor, Retrieved, Tensor]:
        """Returns the model's log p of the actual tokens, the neighbours, and the actual tokens."""
        log_base = torch.from_numpy(np.array(self.records.log_probabilities(split)[rows]))
        targets = torch.from_numpy(self.corpus.split(split).targets(rows))
        return log_base, self.retrievers[split](rows), targets

    def examples(self, split: HeldOut, rows: Int[np.ndarray, "n"]) -> TrainingExamples:
        """Returns the inputs of the adaptive mixture."""
        return self.records.examples(self.corpus.split(split), self.retrievers[split], rows)

    def batches(self, split: HeldOut) -> Iterator[Int[np.ndarray, "n"]]:
        """Yields all positions of a split in batches, in order."""
        for rows in torch.arange(len(self.corpus.split(split))).split(_ROWS):
            yield rows.numpy()


def mix_knn(
    records: Records, corpus: Corpus, table: NeighbourTable, *, settings: KnnSettings, directory: Path
) -> Records:
    """Makes the records of kNN-LM on top of a model; lambda, T and k are the best of the grid on dev."""
    count = min(max(settings.counts), table.array("dev.ids").shape[1])

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        positions = _ScoredPositions.open(records, corpus, table, count=count)
        with bar(f"tune {directory.name}", None) as shown:
            knn, _ = tune_knn(*positions.knn_inputs("dev", _sample(len(corpus.split("dev")))), settings=settings)
            shown.say(f"lambda {knn.weight:.2f}, temperature {knn.temperature:.3g}, k {knn.count}")
        for split in HELD_OUT:
            _write_scores(draft, split, _knn_scores(knn, positions, split))
        return {"knn": asdict(knn)}, []

    own = {"knn": settings.as_json(), "memory_length": records.settings["memory_length"]}
    parents = {"records": records.digest, "neighbours": table.digest}
    records_stage(own, parents).make(directory, fill)
    return Records(directory)


def _knn_scores(knn: Knn, positions: _ScoredPositions, split: HeldOut) -> Iterator[Tensor]:
    """Yields log p of the tokens of a split, batch by batch."""
    for rows in positions.batches(split):
        yield knn.target_log_probabilities(*positions.knn_inputs(split, rows))


def mix_adaptively(
    records: Records,
    corpus: Corpus,
    table: NeighbourTable,
    *,
    settings: AdaptiveSettings,
    directory: Path,
    sources: tuple[Source, ...] = ("neighbours",),
) -> Records:
    """Makes the records of the adaptive mixture of a model and sources of its memory.

    It learns from dev and is never scored on what it learned from: each half of dev is scored by a mixture that learned
    from the other half, test by one that learned from both.
    """
    if not records.has("of_retrieved"):
        raise InputError(f"{records.directory} was made without neighbours; evaluate the model with them")
    count = min(settings.neighbours, records.of("dev", "of_retrieved").shape[1]) if "neighbours" in sources else 0

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        positions = _ScoredPositions.open(records, corpus, table, count=count, matches="matches" in sources)
        dev, test = (range(len(corpus.split(split))) for split in HELD_OUT)
        first, second = _halves(corpus.split("dev"))
        mixtures = {}
        with bar(f"learn {directory.name}", 3) as shown:
            for file, learned_from in zip((*BY_HALF, MIXTURE), (second, first, dev)):
                mixtures[file] = _learn(settings, positions, learned_from)
                save_tensors(draft.directory / file, mixtures[file].state_dict())
                shown.advance()
        on_dev = [(mixtures[file], half) for file, half in zip(BY_HALF, (first, second))]
        _write_scores(draft, "dev", _adaptive_scores(on_dev, positions, "dev"))
        _write_scores(draft, "test", _adaptive_scores([(mixtures[MIXTURE], test)], positions, "test"))
        facts = {"dev_border": len(first), "neighbours": count, "width": mixtures[MIXTURE].width}
        facts |= {"levels": mixtures[MIXTURE].levels} if "matches" in sources else {}
        return facts, [MIXTURE, *BY_HALF]

    own = {
        "adaptive": settings.as_json(),
        "form": PARAMETER_FORMAT,
        "memory_length": records.settings["memory_length"],
        "sources": None if sources == ("neighbours",) else list(sources),
    }
    parents = {"records": records.digest, "neighbours": table.digest}
    records_stage(own, parents).make(directory, fill)
    return Records(directory)


def _learn(settings: AdaptiveSettings, positions: _ScoredPositions, learned_from: range) -> AdaptiveMixture:
    """Returns a mixture that learned from a range of dev."""
    rows = np.asarray(learned_from)
    return learn_mixture(settings, positions.examples("dev", rows[_sample(len(rows))]))


def _adaptive_scores(
    mixtures: list[tuple[AdaptiveMixture, range]], positions: _ScoredPositions, split: HeldOut
) -> Iterator[Tensor]:
    """Yields log p of the tokens of a split, batch by batch; each mixture scores its own range, in order."""
    for rows in positions.batches(split):
        for mixture, scored in mixtures:
            here = rows[(rows >= scored.start) & (rows < scored.stop)]
            if len(here):
                yield mixture.target_log_probabilities(positions.examples(split, here))


def mixture_file(records: Records, split: Split, position: int) -> str:
    """Returns the file of the mixture that scored a position: on dev, the one that did not learn from it."""
    return MIXTURE if split != "dev" else BY_HALF[position >= records.facts["dev_border"]]


def load_mixture(records: Records, file: str) -> AdaptiveMixture:
    """Loads one of the adaptive mixtures of some records."""
    settings = AdaptiveSettings.parse(records.settings["adaptive"], str(records.directory))
    facts = records.facts
    mixture = load_network(
        lambda: AdaptiveMixture(settings, facts["width"], facts["neighbours"], levels=facts.get("levels", 0)),
        records.directory / file,
    )
    return mixture.eval().requires_grad_(requires_grad=False)


def _sample(count: int) -> Int[np.ndarray, "n"]:
    """Returns positions spread evenly over `count`, at most as many as a mixture learns from."""
    return np.arange(count) if count <= _MOST else np.linspace(0, count - 1, _MOST).astype(np.int64)


def _halves(text: TokenSplit) -> tuple[range, range]:
    """Returns a split in two, cut between the documents nearest to its middle, or within one that is very long."""
    count = len(text)
    ends = text.ends[(text.ends > count / 4) & (text.ends < 3 * count / 4)]
    border = int(ends[np.abs(ends - count / 2).argmin()]) if len(ends) else count // 2
    return range(border), range(border, count)


@torch.inference_mode()
def _write_scores(draft: Draft, split: HeldOut, scores: Iterable[Tensor]) -> None:
    """Writes the log-probabilities of a split, which come in batches."""
    found = torch.cat(list(scores))
    assert torch.isfinite(found).all()
    draft.write_array(f"{split}.log_probabilities", found.numpy().astype("<f4"))
