"""The adaptive mixture at a few positions on the CPU, by compiled loops; equal to that of torch but for rounding."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from spalm.semiparametric import matched
from spalm.semiparametric.examples import LEAST_LOG_P, BaseOutputs
from spalm.semiparametric.matched import Matched
from spalm.semiparametric.mixture import kernels
from spalm.semiparametric.mixture.adaptive import SMALL_DISTANCE, AdaptiveMixture, MixtureWeights
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
        self, base: BaseOutputs, log_base: Float[Tensor, "n vocabulary"], retrieved: Retrieved
    ) -> tuple[Float[Tensor, "n vocabulary"], MixtureWeights]:
        """Returns log p of the whole vocabulary, and the weights of the sources and of what they retrieved."""
        found = retrieved.matched if self._levels else None
        if found is None or base.of_matched is None:
            found, of_matched = Matched.nothing(len(log_base))[:, :0], np.zeros((len(log_base), 0, 1), np.float32)
        else:
            of_matched = base.of_matched.numpy()
        tokens, distances = retrieved.tokens.numpy(), retrieved.distances.numpy() / np.float32(self._usual_distance)
        features = self._features(base, tokens, distances, found=found, of_matched=of_matched)
        outputs = np.empty((len(tokens), len(self._layers[-1])), np.float32)
        kernels.network_outputs(base.hidden.float().numpy(), self._scales, features, self._layers, outputs)
        log_sources = np.empty((len(tokens), 2 + of_matched.shape[1]), np.float32)
        matches = np.empty(of_matched.shape, np.float32)
        kernels.source_weights(outputs, distances, found.ids.numpy(), of_matched, log_sources, matches)
        neighbours = np.empty(distances.shape, np.float32)
        if neighbours.size:
            of_retrieved = base.of_retrieved.numpy()
            limits = self._log_temperature, SMALL_DISTANCE
            kernels.neighbour_weights(distances, of_retrieved, outputs, *limits, neighbours)
        mixed = log_base + torch.from_numpy(log_sources[:, :1]).clamp_min(-1e4)
        of_matches = found.tokens.numpy(), matches
        kernels.add_to_mixture(tokens, neighbours, *of_matches, log_sources, mixed.numpy())
        of_matches = torch.from_numpy(matches) if self._levels else None
        return mixed, MixtureWeights(torch.from_numpy(log_sources), torch.from_numpy(neighbours), of_matches)

    def _features(
        self, base: BaseOutputs, tokens: np.ndarray, distances: np.ndarray, *, found: Matched, of_matched: np.ndarray
    ) -> Float[np.ndarray, "n features"]:
        """Returns the features of the positions, not yet normalised, in the order of `AdaptiveMixture.features`."""
        features, end = np.empty((len(tokens), len(self._scales[2])), np.float32), 0
        entropy, highest = base.entropy.numpy(), base.highest.numpy()
        if self._neighbours:
            end = 3 * len(self._ranks) + 6
            given = tokens, distances, base.of_retrieved.numpy(), highest, self._ranks
            kernels.neighbour_features(*given, LEAST_LOG_P, SMALL_DISTANCE, features[:, :end])
        features[:, end], features[:, end + 1] = entropy, highest
        if self._levels:
            start, end = end + 2, end + 2 + self._levels * matched.FEATURES
            lengths = found.lengths.numpy(), found.counts.numpy()
            of_matches = found.tokens.numpy(), found.ids.numpy()
            kernels.match_features(*of_matches, *lengths, of_matched, entropy, features[:, start:end])
            if self._neighbours:
                kernels.agreement_features(tokens, distances, *of_matches, features[:, end:])
        return features


def _array(parameter: Tensor) -> np.ndarray:
    """Returns a copy of a parameter."""
    return np.array(parameter.detach().cpu().numpy(), np.float32)
