"""The shared table of token embeddings: input layer, output layer and, for SPALM, the vectors of retrieved tokens.

Both classes give a normalised distribution over the whole vocabulary.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from spalm.lm.cross_entropy import CrossEntropy, Reduction, cross_entropy, training_cross_entropy


def _in_single_precision(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a method compute in single precision at least, whatever the network around it uses."""

    @wraps(method)
    def wrapped(self, hidden: Tensor, *rest: Any, **options: Any) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return method(self, hidden if hidden.dtype == torch.float64 else hidden.float(), *rest, **options)

    return wrapped


class Vocabulary(nn.Module):
    """A table E with one vector for each token: p = softmax(h E^T)."""

    def __init__(self, size: int, width: int):
        super().__init__()
        self.size, self.width = size, width
        self.table = nn.Parameter(torch.empty(size, width))

    def initialise(self) -> None:
        """Draws the parameters at random."""
        nn.init.normal_(self.table, std=self.width**-0.5)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns the tokens' vectors, the y_k of the paper."""
        return F.embedding(tokens, self.table)

    @_in_single_precision
    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch size"]:
        """Returns log p of every token."""
        return F.log_softmax(F.linear(hidden, self.table), dim=-1)

    def loss(self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"], reduction: Reduction = "sum") -> Tensor:
        """Returns minus the targets' log-probabilities, summed or one for each row, to train with."""
        return self._cost(hidden, targets, cross_entropy=training_cross_entropy(hidden.device), reduction=reduction)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of each row's target."""
        return -self._cost(hidden, targets, cross_entropy=cross_entropy, reduction="none")

    @_in_single_precision
    def _cost(self, hidden: Tensor, targets: Tensor, *, cross_entropy: CrossEntropy, reduction: Reduction) -> Tensor:
        return cross_entropy(hidden, self.table, targets, reduction=reduction)


class AdaptiveVocabulary(nn.Module):
    """The tied adaptive softmax: frequent tokens in a head, rarer ones in tails that the head chooses first.

        p(w | h) = p_head(w | h)                        w among the first cutoffs[0] tokens
        p(w | h) = p_head(tail c | h) p_c(w | h)        w in tail c

    Tail c (from 1) has vectors of width / shrink^c, projected to the full width, the same projection both ways.
    """

    def __init__(self, size: int, width: int, cutoffs: list[int], *, shrink: int = 1):
        super().__init__()
        self.size, self.width = size, width
        self.bounds = [0, *cutoffs, size]
        sizes = [last - first for first, last in zip(self.bounds, self.bounds[1:])]
        widths = [max(1, width // shrink**cluster) for cluster in range(len(sizes))]
        self.tables = nn.ParameterList(torch.empty(n, w) for n, w in zip(sizes, widths))
        self.projections = nn.ParameterList(torch.empty(w, width) for w in widths if w != width)
        self._projected = [w != width for w in widths]
        self.tails = nn.Parameter(torch.empty(len(cutoffs), width))

    def initialise(self) -> None:
        """Draws the parameters at random."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        for projection in self.projections:
            nn.init.normal_(projection, std=projection.shape[0] ** -0.5)

    def _projection(self, cluster: int) -> Tensor | None:
        """Returns the projection from a cluster's width to the full width; None if they are the same."""
        return self.projections[sum(self._projected[:cluster])] if self._projected[cluster] else None

    def _into(self, cluster: int, hidden: Tensor) -> Tensor:
        """Projects hidden states to the width of a cluster's table."""
        projection = self._projection(cluster)
        return hidden if projection is None else F.linear(hidden, projection)

    def _head(self) -> Tensor:
        """Returns the table of the head: the vectors of frequent tokens, then one for each tail."""
        return torch.cat([self.tables[0], self.tails])

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """Returns the tokens' vectors at full width."""
        flat = tokens.reshape(-1)
        embedded = self.tables[0].new_zeros(len(flat), self.width)
        for cluster, (rows, local) in enumerate(self._members(flat)):
            vectors = F.embedding(local, self.tables[cluster])
            projection = self._projection(cluster)
            embedded = embedded.index_copy(0, rows, vectors if projection is None else vectors @ projection)
        return embedded.view(*tokens.shape, self.width)

    def _members(self, tokens: Int[Tensor, "n"]) -> list[tuple[Tensor, Tensor]]:
        """Returns for each cluster the rows whose token is in it, and those tokens counted from the cluster's first."""
        found = []
        for first, last in zip(self.bounds, self.bounds[1:]):
            rows = ((tokens >= first) & (tokens < last)).nonzero().squeeze(1)
            found.append((rows, tokens[rows] - first))
        return found

    @_in_single_precision
    def log_probabilities(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch size"]:
        """Returns log p of every token."""
        head = F.log_softmax(F.linear(self._into(0, hidden), self._head()), dim=-1)
        parts = [head[..., : self.bounds[1]]]
        for cluster in range(1, len(self.tables)):
            within = F.linear(self._into(cluster, hidden), self.tables[cluster])
            chosen = head[..., self.bounds[1] + cluster - 1, None]
            parts.append(chosen + F.log_softmax(within, dim=-1))
        return torch.cat(parts, dim=-1)

    def _choices(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]:
        """Returns the choices, in the head and in tails, that lead to the targets.

        Each is the rows that make it, and their hidden states, the vectors that they choose from, and what they choose.
        """
        members = self._members(targets)
        in_head = targets.clone()
        for cluster, (rows, _) in enumerate(members[1:]):
            in_head[rows] = self.bounds[1] + cluster
        everything = torch.arange(len(targets), device=targets.device)
        choices = [(everything, (hidden, self._head(), in_head))]
        for cluster, (rows, local) in enumerate(members):
            if cluster and len(rows):
                choices.append((rows, (self._into(cluster, hidden[rows]), self.tables[cluster], local)))
        return choices

    def loss(self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"], reduction: Reduction = "sum") -> Tensor:
        """Returns minus the targets' log-probabilities, summed or one for each row, to train with."""
        return self._cost(hidden, targets, cross_entropy=training_cross_entropy(hidden.device), reduction=reduction)

    def target_log_probabilities(
        self, hidden: Float[Tensor, "n width"], targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Returns log p of each row's target."""
        return -self._cost(hidden, targets, cross_entropy=cross_entropy, reduction="none")

    @_in_single_precision
    def _cost(self, hidden: Tensor, targets: Tensor, *, cross_entropy: CrossEntropy, reduction: Reduction) -> Tensor:
        (_, total), *others = (
            (rows, cross_entropy(*choice, reduction=reduction)) for rows, choice in self._choices(hidden, targets)
        )
        for rows, cost in others:
            total = total + cost if reduction == "sum" else total.index_add(0, rows, cost)
        return total
