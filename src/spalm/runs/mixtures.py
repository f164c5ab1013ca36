"""Records and neighbours to the records of a mixture: kNN-LM's fixed weight, or the adaptive one.

Both are made from what is on disk, without reading the text again. What is tuned on dev is saved with the result.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int

from spalm.artifact import Draft
from spalm.console import bar
from spalm.corpus import Corpus, Split, TokenSplit
from spalm.errors import InputError
from spalm.neighbours import NeighbourTable
from spalm.runs.records import Records, records_stage
from spalm.runs.rows import HELD_OUT
from spalm.semiparametric.adaptive import PARAMETER_FORMAT, AdaptiveMixture, AdaptiveSettings, learn_mixture
from spalm.semiparametric.knn import KnnSettings, tune_knn
from spalm.semiparametric.retrieval import Retriever
from spalm.training import load_parameters
from spalm.training.checkpoint import save_tensors

MIXTURE = "mixture.safetensors"
"""Learned from all of dev; it scores test."""
BY_HALF = ("mixture-first.safetensors", "mixture-second.safetensors")
"""Each learned from the other half of dev; they score dev."""
_ROWS = 1 << 15
"""Positions that are mixed at a time."""
_MOST = 150_000
"""Positions that a mixture learns from."""


def mix_knn(records: Records, corpus: Corpus, table: NeighbourTable, settings: KnnSettings, directory: Path) -> Records:
    """kNN-LM on top of a model's records: lambda, T and k are the best on dev."""
    most = min(max(settings.counts), table.array("dev.ids").shape[1])

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        retrievers = {split: Retriever(table, split, most) for split in HELD_OUT}
        dev = corpus.split("dev")
        with bar(f"tune {directory.name}", None) as shown:
            rows = _spread(len(dev))
            base = torch.from_numpy(np.array(records.log_probabilities("dev")[rows]))
            knn, _ = tune_knn(base, retrievers["dev"](rows), torch.from_numpy(dev.targets(rows)), settings)
            shown.say(f"lambda {knn.weight:.2f}, temperature {knn.temperature:.3g}, k {knn.count}")
        for text in map(corpus.split, HELD_OUT):

            def score(rows: np.ndarray, text=text) -> torch.Tensor:
                base = torch.from_numpy(np.array(records.log_probabilities(text.split)[rows]))
                targets = torch.from_numpy(text.targets(rows))
                return knn.target_log_probabilities(base, retrievers[text.split](rows), targets)

            _write(draft, text, score)
        return {"knn": asdict(knn)}, []

    own = {"knn": settings.as_json(), **_about(records)}
    parents = {"records": records.digest, "neighbours": table.digest}
    records_stage(own, parents).make(directory, fill)
    return Records(directory)


def mix_adaptively(
    records: Records, corpus: Corpus, table: NeighbourTable, settings: AdaptiveSettings, directory: Path
) -> Records:
    """The adaptive mixture on top of a model's records. It learns from dev, and is never scored on what it learned
    from: each half of dev is scored by a mixture that learned from the other, test by one that learned from both."""
    if not records.has("of_retrieved"):
        raise InputError(f"{records.directory} was made without neighbours; evaluate the model with them")
    most = min(settings.neighbours, records.of("dev", "of_retrieved").shape[1])

    def fill(draft: Draft) -> tuple[dict, list[str]]:
        retrievers = {split: Retriever(table, split, most) for split in HELD_OUT}
        dev = corpus.split("dev")
        halves = _halves(dev)

        def learned(rows: np.ndarray) -> AdaptiveMixture:
            rows = rows[_spread(len(rows))]
            return learn_mixture(settings, records.examples(dev, retrievers["dev"], rows))

        def scored_by(mixture: AdaptiveMixture, text: TokenSplit) -> Callable[[np.ndarray], torch.Tensor]:
            def score(rows: np.ndarray) -> torch.Tensor:
                part = records.examples(text, retrievers[text.split], rows)
                return mixture.target_log_probabilities(part)

            return score

        with bar(f"learn {directory.name}", 3) as shown:
            by_half = []
            for file, other in zip(BY_HALF, reversed(halves)):
                mixture = learned(other)
                save_tensors(draft.directory / file, mixture.state_dict())
                by_half.append(scored_by(mixture, dev))
                shown.advance()
            whole = learned(np.arange(len(dev)))
            shown.advance()
        border = len(halves[0])

        def score_dev(rows: np.ndarray) -> torch.Tensor:
            parts = [(by_half[0], rows[rows < border]), (by_half[1], rows[rows >= border])]
            return torch.cat([score(part) for score, part in parts if len(part)])

        _write(draft, dev, score_dev)
        _write(draft, corpus.split("test"), scored_by(whole, corpus.split("test")))
        save_tensors(draft.directory / MIXTURE, whole.state_dict())
        return {"dev_border": border, "neighbours": most, "width": whole.hidden_norm.normalized_shape[0]}, [
            MIXTURE,
            *BY_HALF,
        ]

    own = {"adaptive": settings.as_json(), "form": PARAMETER_FORMAT, **_about(records)}
    parents = {"records": records.digest, "neighbours": table.digest}
    records_stage(own, parents).make(directory, fill)
    return Records(directory)


def load_mixture(records: Records, split: Split, position: int) -> AdaptiveMixture:
    """The mixture that scored a position: of dev it is the one that did not learn from it."""
    file = MIXTURE if split != "dev" else BY_HALF[position >= records.facts["dev_border"]]
    settings = AdaptiveSettings.parse(records.settings["adaptive"], str(records.directory))
    mixture = AdaptiveMixture(settings, records.facts["width"], records.facts["neighbours"])
    load_parameters(mixture, records.directory / file)
    return mixture.eval().requires_grad_(False)


def _about(records: Records) -> dict[str, int]:
    return {"memory_length": records.settings["memory_length"]}


def _spread(count: int) -> Int[np.ndarray, "n"]:
    """Positions from all over, not more than a mixture needs."""
    return np.arange(count) if count <= _MOST else np.linspace(0, count - 1, _MOST).astype(np.int64)


def _halves(text: TokenSplit) -> list[np.ndarray]:
    """A split in two, between the documents nearest to its middle, or in the middle of one that is very long."""
    count = len(text)
    ends = text.ends[(text.ends > count / 4) & (text.ends < 3 * count / 4)]
    border = int(ends[np.abs(ends - count / 2).argmin()]) if len(ends) else count // 2
    return [np.arange(border), np.arange(border, len(text))]


@torch.inference_mode()
def _write(draft: Draft, text: TokenSplit, score: Callable[[np.ndarray], torch.Tensor]) -> None:
    rows = torch.arange(len(text)).split(_ROWS)
    found = torch.cat([score(part.numpy()) for part in rows])
    assert torch.isfinite(found).all()
    draft.write_array(f"{text.split}.log_probabilities", found.numpy().astype("<f4"))
