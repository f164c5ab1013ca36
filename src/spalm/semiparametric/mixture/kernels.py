"""Compiled loops of the adaptive mixture, for a few positions while text is generated.

They compute what `adaptive.py` computes with a hundred small operations of torch, each of which costs more than its
arithmetic when there is only one position. Names and shapes are as there; missing neighbours have infinite distances,
missing occurrences the id MISSING. There are no operations on whole arrays, because numba takes seconds to compile one.
"""

import math

import numpy as np

from spalm.compute.compiled import compiled
from spalm.memory import MISSING

NORM_EPSILON = 1e-5
"""Number that the hidden state's norm adds to the variance."""
FARTHEST = 4.0
"""Highest distance that counts in the features, in usual distances."""


_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
_LEAST_EXPONENT = np.float32(-87.0)
"""Number whose exponential is about the smallest normal one in single precision."""
_EXP_TERMS = tuple(map(np.float32, (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)))
"""Coefficients of x^2, x^3, ... in the series of the exponential."""


@compiled(fastmath={"nnan", "nsz", "reassoc", "contract"})
def _exponential_sums(scores, peak):
    """Returns the sum of e^(score - peak), and the sum of these weighted by score - peak.

    The exponential is a polynomial times a power of two made of its bits: the compiler makes wide instructions of that.
    """
    total = weighted = np.float32(0)
    second, third, fourth, fifth, sixth, seventh = _EXP_TERMS
    for i in range(len(scores)):
        gap = max(scores[i] - peak, _LEAST_EXPONENT)
        power = np.floor(gap * _LOG2E + np.float32(0.5))
        x = gap - power * _LN2_HIGH - power * _LN2_LOW
        series = ((((seventh * x + sixth) * x + fifth) * x + fourth) * x + third) * x + second
        series = series * x * x + x + np.float32(1)
        exponential = series * np.int32((np.int32(power) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
        total += exponential
        weighted += exponential * gap
    return total, weighted


@compiled(fastmath={"nnan", "nsz", "reassoc", "contract"})
def _highest(scores):
    """Returns the highest of some numbers."""
    highest = scores[0]
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    return highest


@compiled()
def base_outputs(scores, tokens, matched_tokens, least, log_base, of_base):
    """Fills log p of the base, by its logits, and what `BaseOutputs` holds of it: entropy, highest, of tokens.

    Logits that are log p already stay as they are, but for rounding.
    """
    entropy, highest, of_retrieved, of_matched = of_base
    least = np.float32(least)
    for row in range(len(scores)):
        peak = _highest(scores[row])
        total, weighted = _exponential_sums(scores[row], peak)
        log_total = np.float32(math.log(total))
        entropy[row], highest[row] = log_total - weighted / total, -log_total
        for i in range(scores.shape[1]):
            log_base[row, i] = scores[row, i] - peak - log_total
        for k in range(tokens.shape[1]):
            of_retrieved[row, k] = max(log_base[row, tokens[row, k]], least)
        for level in range(matched_tokens.shape[1]):
            for j in range(matched_tokens.shape[2]):
                of_matched[row, level, j] = max(log_base[row, matched_tokens[row, level, j]], least)


@compiled(fastmath={"reassoc", "contract"})
def network_outputs(hidden, scales, features, layers, outputs):
    """Fills the outputs of the network at some positions.

    `scales`: weight and bias of the hidden state's norm, mean and spread of the features. `layers`: weight and bias of
    each of the three layers.
    """
    width, count = hidden.shape[1], features.shape[1]
    norm_weight, norm_bias, mean, spread = scales
    inputs = np.empty(width + count, np.float32)
    for row in range(len(hidden)):
        centre = variance = np.float32(0)
        for i in range(width):
            centre += hidden[row, i]
        centre /= np.float32(width)
        for i in range(width):
            variance += (hidden[row, i] - centre) ** 2
        factor = np.float32(1 / math.sqrt(variance / width + NORM_EPSILON))
        for i in range(width):
            inputs[i] = (hidden[row, i] - centre) * factor * norm_weight[i] + norm_bias[i]
        for i in range(count):
            inputs[width + i] = (features[row, i] - mean[i]) / spread[i]
        first = _gelu(_linear(inputs, layers[0], layers[1]))
        second = _gelu(_linear(first, layers[2], layers[3]))
        last = _linear(second, layers[4], layers[5])
        for o in range(len(last)):
            outputs[row, o] = last[o]


@compiled(fastmath={"reassoc", "contract"})
def _linear(inputs, weight, bias):
    """Returns the outputs of a linear layer."""
    outputs = np.empty(len(bias), np.float32)
    for o in range(len(bias)):
        total = np.float32(0)
        for i in range(len(inputs)):
            total += weight[o, i] * inputs[i]
        outputs[o] = total + bias[o]
    return outputs


@compiled()
def _gelu(inputs):
    """Returns x Phi(x) of every number."""
    for i in range(len(inputs)):
        inputs[i] *= 0.5 * (1 + math.erf(inputs[i] / math.sqrt(2.0)))
    return inputs


@compiled()
def source_weights(outputs, distances, ids, of_matched, log_sources, weights):
    """Fills the logarithms of the sources' weights, and the weights of the occurrences of each exact match."""
    for row in range(len(outputs)):
        log_sources[row, 0], log_sources[row, 1] = 0.0, -np.inf
        for k in range(distances.shape[1]):
            if np.isfinite(distances[row, k]):
                log_sources[row, 1] = outputs[row, 0]
        for level in range(ids.shape[1]):
            highest = -np.inf
            for j in range(ids.shape[2]):
                if ids[row, level, j] != MISSING:
                    highest = max(highest, outputs[row, 4] * of_matched[row, level, j])
            total = 0.0
            for j in range(ids.shape[2]):
                weights[row, level, j] = 0.0
                if ids[row, level, j] != MISSING:
                    weights[row, level, j] = math.exp(outputs[row, 4] * of_matched[row, level, j] - highest)
                    total += weights[row, level, j]
            log_sources[row, 2 + level] = outputs[row, 5 + level] if total else -np.inf
            for j in range(ids.shape[2] if total else 0):
                weights[row, level, j] /= np.float32(total)
        _log_softmax(log_sources[row])


@compiled()
def _log_softmax(numbers):
    """Subtracts the logarithm of the sum of exponentials, in place."""
    highest, total = -np.inf, 0.0
    for i in range(len(numbers)):
        highest = max(highest, numbers[i])
    for i in range(len(numbers)):
        total += math.exp(numbers[i] - highest)
    for i in range(len(numbers)):
        numbers[i] -= np.float32(highest + math.log(total))


@compiled()
def neighbour_features(tokens, distances, of_retrieved, highest, ranks, least, small, features):
    """Fills the features of the neighbours; `distances` are in usual distances, `least` the lowest log p."""
    count = tokens.shape[1]
    first_summary = 3 * len(ranks)
    for row in range(len(tokens)):
        new = _first_occurrences(tokens[row])
        weights = _near_weights(distances[row])
        as_first = agreed = new_mass = mean_log = 0.0
        best = np.float32(least)
        distinct, rank = 0, 0
        for k in range(count):
            present = np.isfinite(distances[row, k])
            log_p = of_retrieved[row, k] if present else np.float32(least)
            p = math.exp(log_p)
            distinct += new[k] and present
            best = max(best, log_p)
            agreed += weights[k] * p
            mean_log += weights[k] * log_p
            if tokens[row, k] == tokens[row, 0]:
                as_first += weights[k]
            if new[k] and present:
                new_mass += p
            if rank < len(ranks) and k == ranks[rank]:
                distance = min(distances[row, k], FARTHEST)
                features[row, rank] = distance
                features[row, len(ranks) + rank] = math.log(distance + small)
                features[row, 2 * len(ranks) + rank] = distinct
                rank += 1
        features[row, first_summary] = as_first
        features[row, first_summary + 1] = agreed
        features[row, first_summary + 2] = of_retrieved[row, 0] if np.isfinite(distances[row, 0]) else least
        features[row, first_summary + 3] = best - highest[row]
        features[row, first_summary + 4] = new_mass
        features[row, first_summary + 5] = mean_log


@compiled()
def _first_occurrences(tokens):
    """Returns a mask of the neighbours whose token no nearer neighbour has."""
    highest = 0
    for k in range(len(tokens)):
        highest = max(highest, tokens[k])
    seen = np.zeros(highest + 1, np.bool_)
    new = np.empty(len(tokens), np.bool_)
    for k in range(len(tokens)):
        new[k] = not seen[tokens[k]]
        seen[tokens[k]] = True
    return new


@compiled()
def _near_weights(distances):
    """Returns weights of neighbours that fall with their distances, the same at every position."""
    weights = np.empty(len(distances), np.float32)
    nearest = FARTHEST
    for k in range(len(distances)):
        nearest = min(nearest, distances[k])
    total = 0.0
    for k in range(len(distances)):
        weights[k] = math.exp(-8 * (min(distances[k], FARTHEST) - nearest))
        total += weights[k]
    for k in range(len(weights)):
        weights[k] /= np.float32(total)
    return weights


@compiled()
def match_features(tokens, ids, lengths, counts, of_matched, entropy, features):
    """Fills the features of the exact matches, level after level."""
    rows, levels, occurrences = tokens.shape
    for row in range(rows):
        for level in range(levels):
            number, peak, top, distinct, total = 0, 0, 0, 0.0, 0.0
            for j in range(occurrences):
                if ids[row, level, j] == MISSING:
                    continue
                votes = 0
                for other in range(occurrences):
                    same = tokens[row, level, other] == tokens[row, level, j]
                    votes += same and ids[row, level, other] != MISSING
                number += 1
                distinct += 1 / votes
                total += of_matched[row, level, j]
                if votes > peak:
                    peak, top = votes, j
            number = max(1, number)
            matches = lengths[row, level] > 0
            found = features[row, 7 * level : 7 * level + 7]
            found[0], found[1] = math.log(lengths[row, level] + 1), math.log(counts[row, level] + 1)
            found[2], found[3] = peak / number, math.log1p(distinct)
            found[4] = of_matched[row, level, top] if matches else -entropy[row]
            found[5] = total / number if matches else -entropy[row]
            found[6] = lengths[row, level] > 8


@compiled()
def agreement_features(tokens, distances, matched_tokens, matched_ids, features):
    """Fills, for each exact match, the neighbours' weight on the tokens that followed it, averaged over these."""
    rows, levels, occurrences = matched_tokens.shape
    for row in range(rows):
        weights = _near_weights(distances[row])
        for level in range(levels):
            total = 0.0
            for j in range(occurrences):
                if matched_ids[row, level, j] != MISSING:
                    token = matched_tokens[row, level, j]
                    for k in range(tokens.shape[1]):
                        if tokens[row, k] == token and np.isfinite(distances[row, k]):
                            total += weights[k]
            features[row, level] = total / occurrences


@compiled()
def neighbour_weights(distances, of_retrieved, outputs, log_temperature, small, weights):
    """Fills the weights of the neighbours among themselves; the same for all where there is none."""
    for row in range(len(distances)):
        scale = np.float32(math.exp(min(max(outputs[row, 1], -5.0), 5.0) - log_temperature))
        agreement = outputs[row, 2]
        sharpness = np.float32(math.log1p(math.exp(-abs(outputs[row, 3]))) + max(outputs[row, 3], 0.0))
        highest = np.float32(-1e9)
        for k in range(distances.shape[1]):
            score = np.float32(-1e9)
            if np.isfinite(distances[row, k]):
                distance = distances[row, k]
                score = -scale * distance + agreement * of_retrieved[row, k]
                score -= sharpness * np.float32(math.log(distance + small))
            weights[row, k] = score
            highest = max(highest, score)
        total = 0.0
        for k in range(distances.shape[1]):
            weights[row, k] = math.exp(weights[row, k] - highest)
            total += weights[row, k]
        for k in range(distances.shape[1]):
            weights[row, k] /= np.float32(total)


@compiled()
def add_to_mixture(tokens, neighbours, matched_tokens, matches, log_sources, mixed):
    """Weighs the base's log-probabilities, and adds the memory's probabilities of the tokens that it proposes."""
    count, levels, occurrences = tokens.shape[1], matched_tokens.shape[1], matched_tokens.shape[2]
    proposed = np.empty(count + levels * occurrences, np.int64)
    added = np.empty(len(proposed))
    shares = np.empty(mixed.shape[1])  # of the memory, where a token was proposed; -1 when it has been added
    for row in range(len(tokens)):
        log_share = max(log_sources[row, 0], np.float32(-1e4))
        for i in range(mixed.shape[1]):
            mixed[row, i] += log_share
        of_neighbours = math.exp(log_sources[row, 1])
        for k in range(count):
            proposed[k], added[k] = tokens[row, k], of_neighbours * neighbours[row, k]
        for level in range(levels):
            of_match = math.exp(log_sources[row, 2 + level])
            for j in range(occurrences):
                at = count + level * occurrences + j
                proposed[at], added[at] = matched_tokens[row, level, j], of_match * matches[row, level, j]
        for j in range(len(proposed)):
            shares[proposed[j]] = 0.0
        for j in range(len(proposed)):
            shares[proposed[j]] += added[j]
        for j in range(len(proposed)):
            token = proposed[j]
            if shares[token] >= 0:
                more, known = math.log(max(shares[token], 1e-38)), mixed[row, token]
                higher, lower = max(more, known), min(more, known)
                mixed[row, token] = higher + math.log1p(math.exp(lower - higher))
                shares[token] = -1.0


@compiled()
def weights_in_memory(log_sources, distances, neighbours, matches, base_share):
    """Fills the base's share, and turns weights within a source into weights within the memory's share."""
    for row in range(len(log_sources)):
        base_share[row] = math.exp(log_sources[row, 0])
        of_memory = 0.0
        for source in range(1, log_sources.shape[1]):
            of_memory += math.exp(log_sources[row, source])
        share = np.float32(math.exp(log_sources[row, 1]) / of_memory) if of_memory else np.float32(0)
        for k in range(neighbours.shape[1]):
            neighbours[row, k] *= share if np.isfinite(distances[row, k]) else np.float32(0)
        for level in range(matches.shape[1]):
            share = np.float32(math.exp(log_sources[row, 2 + level]) / of_memory) if of_memory else np.float32(0)
            for j in range(matches.shape[2]):
                matches[row, level, j] *= share
