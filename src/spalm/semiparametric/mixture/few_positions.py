"""The adaptive mixture at a few positions on the CPU, by compiled loops; equal to that of torch but for rounding."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spalm.semiparametric import matched
from spalm.semiparametric.examples import LEAST_LOG_P
from spalm.semiparametric.mixture import kernels
from spalm.semiparametric.mixture.adaptive import SMALL_DISTANCE, AdaptiveMixture
from spalm.semiparametric.retrieval import Retrieved

MOST_POSITIONS = 64
"""Number of positions up to which the loops are faster than the operations of torch."""


class CompiledMixture:
    """A fitted mixture in the form that the compiled loops take. Later changes of its parameters do not show."""

    def __init__(self, mixture: AdaptiveMixture):
        self._neighbours, self._levels = mixture.neighbours, mixture.levels
        self._ranks = np.array(mixture.ranks, np.int64)
        self._usual_distance = float(mixture.usual_distance)
        self._log_temperature = float(mixture.log_temperature)
        norm = mixture.hidden_norm
        self._scales = tuple(map(_array, (norm.weight, norm.bias, mixture.mean, mixture.spread)))
        layers = [layer for layer in mixture.network if isinstance(layer, nn.Linear)]
        self._layers = tuple(_array(each) for layer in layers for each in (layer.weight, layer.bias))

    @torch.inference_mode()
    def __call__(
        self, hidden: Float[Tensor, "n width"], scores: Float[Tensor, "n vocabulary"], retrieved: Retrieved
    ) -> tuple[
        Float[Tensor, "n vocabulary"],
        Float[Tensor, "n"],
        Float[Tensor, "n count"],
        Float[Tensor, "n levels occurrences"] | None,
    ]:
        """Returns the fields of the prediction: log p of the whole vocabulary, the base's share, and weights.

        `scores` are the base's logits, or log p. The weights are those of the neighbours, and of the occurrences of
        exact matches if the mixture uses them, within the memory's share.
        """
        near = _Neighbours(retrieved, self._usual_distance)
        matches = _Matches(retrieved, self._levels)
        rows = len(hidden)
        log_p = np.empty(scores.shape, np.float32)
        base = _Base(rows, near.tokens.shape[1], matches.tokens.shape)
        kernels.base_outputs(scores.numpy(), near.tokens, matches.tokens, LEAST_LOG_P, log_p, base.arrays)
        features = self._features(base, near, matches)
        outputs = np.empty((rows, len(self._layers[-1])), np.float32)
        kernels.network_outputs(hidden.float().numpy(), self._scales, features, self._layers, outputs)
        log_sources = np.empty((rows, 2 + self._levels), np.float32)
        of_matches, of_neighbours = np.empty(matches.tokens.shape, np.float32), np.empty(near.tokens.shape, np.float32)
        kernels.source_weights(outputs, near.distances, matches.ids, base.of_matched, log_sources, of_matches)
        if self._neighbours:
            limits = self._log_temperature, SMALL_DISTANCE
            kernels.neighbour_weights(near.distances, base.of_retrieved, outputs, *limits, of_neighbours)
        kernels.add_to_mixture(near.tokens, of_neighbours, matches.tokens, of_matches, log_sources, log_p)
        base_share = np.empty(rows, np.float32)
        kernels.weights_in_memory(log_sources, near.distances, of_neighbours, of_matches, base_share)
        matched_weights = torch.from_numpy(of_matches) if self._levels else None
        return torch.from_numpy(log_p), torch.from_numpy(base_share), torch.from_numpy(of_neighbours), matched_weights

    def _features(self, base: "_Base", near: "_Neighbours", matches: "_Matches") -> Float[np.ndarray, "n features"]:
        """Returns the features of the positions, not yet normalised, in the order of `AdaptiveMixture.features`."""
        features, end = np.empty((len(base.entropy), len(self._scales[2])), np.float32), 0
        if self._neighbours:
            end = 3 * len(self._ranks) + 6
            given = near.tokens, near.distances, base.of_retrieved, base.highest, self._ranks
            kernels.neighbour_features(*given, LEAST_LOG_P, SMALL_DISTANCE, features[:, :end])
        features[:, end], features[:, end + 1] = base.entropy, base.highest
        if self._levels:
            start, end = end + 2, end + 2 + self._levels * matched.FEATURES
            lengths = matches.lengths, matches.counts
            given = base.of_matched, base.entropy
            kernels.match_features(matches.tokens, matches.ids, *lengths, *given, features[:, start:end])
            if self._neighbours:
                of_neighbours = near.tokens, near.distances
                kernels.agreement_features(*of_neighbours, matches.tokens, matches.ids, features[:, end:])
        return features


class _Neighbours:
    """The neighbours of some positions, as arrays."""

    def __init__(self, retrieved: Retrieved, usual_distance: float):
        self.tokens = retrieved.tokens.numpy()
        self.distances = retrieved.distances.numpy() / np.float32(usual_distance)
        """Distances in usual distances."""


class _Matches:
    """The exact matches of some positions, as arrays; without levels if the mixture uses none."""

    def __init__(self, retrieved: Retrieved, levels: int):
        found = retrieved.matched
        if levels and found is not None:
            self.tokens, self.ids = found.tokens.numpy(), found.ids.numpy()
            self.lengths, self.counts = found.lengths.numpy(), found.counts.numpy()
        else:
            self.tokens = self.ids = np.zeros((len(retrieved.tokens), levels, 0), np.int64)
            self.lengths = self.counts = np.zeros(self.tokens.shape[:2], np.float32)


class _Base:
    """What the mixture needs of the base's distributions, as in `BaseOutputs`: arrays that are still to be filled."""

    def __init__(self, rows: int, neighbours: int, matches: tuple[int, ...]):
        self.entropy, self.highest = np.empty(rows, np.float32), np.empty(rows, np.float32)
        self.of_retrieved = np.empty((rows, neighbours), np.float32)
        self.of_matched = np.empty(matches, np.float32)
        self.arrays = self.entropy, self.highest, self.of_retrieved, self.of_matched


def _array(parameter: Tensor) -> np.ndarray:
    """Returns a copy of a parameter."""
    return np.array(parameter.detach().cpu().numpy(), np.float32)
