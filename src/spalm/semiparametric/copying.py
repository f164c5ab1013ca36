"""The copy term, beyond the paper: retrieved tokens get a share of the probabilities beside the output layer.

    p(w) = (1 - c_t) softmax(z_t W)(w) + c_t sum_(k: y_k = w) a_k                a_k >= 0, sum_k a_k = 1

It is kNN-LM's mixture, with a weight c_t and weights a_k that are learned with the network. Both parts are normalised
over the vocabulary, so p is; tokens that were not retrieved keep 1 - c_t of what the softmax gives them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spalm.semiparametric.knn import scatter_to_vocabulary

_LEAST = 1e-38
"""Stands for a probability of 0, because the gradient of log 0 is not a number."""


@dataclass(frozen=True)
class CopyTerm:
    """Shares of the probability that go to retrieved tokens at some positions."""

    tokens: Int[Tensor, "*batch count"]
    """Retrieved tokens y_k."""
    shares: Float[Tensor, "*batch count"]
    """Probability that each of them gets, c_t a_k; 0 where there is no neighbour."""
    log_network: Float[Tensor, "*batch"]
    """Logarithm of what is left for the output layer, 1 - c_t; 0 where nothing was retrieved."""

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "*batch count"],
        log_weights: Float[Tensor, "*batch count_and_none"],
        logit: Float[Tensor, "*batch"],
        *,
        present: Tensor,
    ) -> "CopyTerm":
        """Returns the term with c_t = sigmoid(`logit`) and weights whose logarithms are given, a column for each token.

        One more column is the weight of "none of them", which goes to the output layer.
        """
        log_copied, log_kept = torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
        count = tokens.shape[-1]
        if log_weights.shape[-1] > count:
            log_kept = torch.logaddexp(log_kept, log_copied + log_weights[..., count])
        shares = (log_copied[..., None] + log_weights[..., :count]).exp() * present
        return cls(tokens, shares, log_kept.masked_fill(~present.any(-1), 0.0))

    def __getitem__(self, rows) -> "CopyTerm":
        return CopyTerm(self.tokens[rows], self.shares[rows], self.log_network[rows])

    def flatten(self) -> "CopyTerm":
        """Returns the term with all positions in one dimension."""
        return CopyTerm(self.tokens.flatten(0, -2), self.shares.flatten(0, -2), self.log_network.flatten())

    @property
    def share(self) -> Float[Tensor, "*batch"]:
        """Share of all retrieved tokens together."""
        return self.shares.sum(-1)

    def target_log_probabilities(
        self, log_network: Float[Tensor, "*batch"], targets: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Returns log p of one token at each position, from its log-probability under the output layer."""
        copied = (self.shares * (self.tokens == targets[..., None])).sum(-1)
        return torch.logaddexp(log_network + self.log_network, copied.clamp_min(_LEAST).log())

    def log_probabilities(self, log_network: Float[Tensor, "*batch vocabulary"]) -> Float[Tensor, "*batch vocabulary"]:
        """Returns log p of every token of the vocabulary, from the log-probabilities of the output layer."""
        kept = log_network + self.log_network[..., None]
        copied = scatter_to_vocabulary(self.shares, self.tokens, kept.shape[-1]).gather(-1, self.tokens)
        known = kept.gather(-1, self.tokens)
        return kept.scatter(-1, self.tokens, torch.logaddexp(known, copied.clamp_min(_LEAST).log()))
