"""The adaptive mixture at a few positions on the CPU, by compiled loops; equal to that of torch but for rounding."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from spalm.semiparametric import matched
from spalm.semiparametric.examples import LEAST_LOG_P, BaseOutputs
from spalm.semiparametric.matched import Matched
from spalm.semiparametric.mixture import kernels
from spalm.semiparametric.mixture.adaptive import SMALL_DISTANCE, AdaptiveMixture, MixtureWeights
from spalm.semiparametric.retrieval import Retrieved

MOST_POSITIONS = 64
"""Number of positions up to which the loops are faster than the operations of torch."""


@torch.inference_mode()
def mix(
    mixture: AdaptiveMixture, base: BaseOutputs, log_base: Float[Tensor, "n vocabulary"], retrieved: Retrieved
) -> tuple[Float[Tensor, "n vocabulary"], MixtureWeights]:
    """Returns log p of the whole vocabulary, and the weights of the sources and of what they retrieved."""
    distances = (retrieved.distances / mixture.usual_distance).numpy()
    features = (_features(mixture, base, retrieved, distances) - mixture.mean) / mixture.spread
    outputs = mixture.network(torch.cat([mixture.hidden_norm(base.hidden.float()), features], -1))
    of_neighbours = outputs[..., :1].masked_fill(~retrieved.present.any(-1, keepdim=True), -torch.inf)
    logits = [torch.zeros_like(of_neighbours), of_neighbours]
    matches, found = None, retrieved.matched
    if mixture.levels and found is not None and base.of_matched is not None:
        some = found.present
        matches = torch.softmax((outputs[..., 4, None, None] * base.of_matched).masked_fill(~some, -1e9), -1) * some
        logits.append(outputs[..., 5:].masked_fill(~some.any(-1), -torch.inf))
    log_sources = torch.log_softmax(torch.cat(logits, -1), dim=-1)
    weights = MixtureWeights(log_sources, _neighbour_weights(mixture, outputs, base, distances), matches)
    return _mixed(log_base, retrieved, weights), weights


def _features(
    mixture: AdaptiveMixture, base: BaseOutputs, retrieved: Retrieved, distances: np.ndarray
) -> Float[Tensor, "n features"]:
    """Returns the features of the positions, not yet normalised, in the order of `AdaptiveMixture.features`."""
    features = torch.empty(len(distances), len(mixture.mean))
    columns, end = features.numpy(), 0
    tokens = retrieved.tokens.numpy()
    if mixture.neighbours:
        end = 3 * len(mixture.ranks) + 6
        log_p, highest, ranks = base.of_retrieved.numpy(), base.highest.numpy(), np.array(mixture.ranks)
        limits = LEAST_LOG_P, SMALL_DISTANCE
        kernels.neighbour_features(tokens, distances, log_p, highest, ranks, *limits, columns[:, :end])
    features[:, end], features[:, end + 1] = base.entropy, base.highest
    found = retrieved.matched
    if mixture.levels and found is not None and base.of_matched is not None:
        start, end = end + 2, end + 2 + mixture.levels * matched.FEATURES
        _match_features(found, base.of_matched, base.entropy, columns[:, start:end])
        if mixture.neighbours:
            of_matches = found.tokens.numpy(), found.ids.numpy()
            kernels.agreement_features(tokens, distances, *of_matches, columns[:, end:])
    return features


def _match_features(found: Matched, of_matched: Tensor, entropy: Tensor, columns: np.ndarray) -> None:
    """Fills the features of the exact matches."""
    given = found.tokens, found.ids, found.lengths, found.counts, of_matched, entropy
    kernels.match_features(*(each.numpy() for each in given), columns)


def _neighbour_weights(
    mixture: AdaptiveMixture, outputs: Float[Tensor, "n outputs"], base: BaseOutputs, distances: np.ndarray
) -> Float[Tensor, "n count"]:
    """Returns the weights of the neighbours among themselves."""
    temperature, agreement, sharpness = outputs[..., 1:4].unbind(-1)
    scale = torch.exp(temperature.clamp(-5, 5) - mixture.log_temperature)
    found = torch.empty(distances.shape)
    if found.numel():
        numbers = (each.numpy() for each in (scale, agreement, F.softplus(sharpness)))
        kernels.neighbour_weights(distances, base.of_retrieved.numpy(), *numbers, SMALL_DISTANCE, found.numpy())
    return found


def _mixed(
    log_base: Float[Tensor, "n vocabulary"], retrieved: Retrieved, weights: MixtureWeights
) -> Float[Tensor, "n vocabulary"]:
    """Returns log p of the whole vocabulary."""
    shares = weights.log_sources.exp()
    tokens, added = [retrieved.tokens], [shares[..., 1:2] * weights.neighbours]
    if weights.matches is not None and retrieved.matched is not None:
        tokens.append(retrieved.matched.tokens.flatten(-2))
        added.append((shares[..., 2:, None] * weights.matches).flatten(-2))
    mixed = log_base + weights.log_sources[..., :1].clamp_min(-1e4)
    kernels.add_to_mixture(torch.cat(tokens, -1).numpy(), torch.cat(added, -1).numpy(), mixed.numpy())
    return mixed
