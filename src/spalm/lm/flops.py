"""Counts the operations that a network needs for a token: only those of matrix products, two for each multiply-add."""

from dataclasses import dataclass

from spalm.lm.transformer import NetworkSettings


@dataclass(frozen=True)
class Flops:
    """Operations of a token, averaged over a segment."""

    hidden: float
    """Operations for its hidden state."""
    output: float
    """Operations for its distribution, where the softmax is not adaptive."""
    constant: float
    """The part of `hidden` whose operands get no gradient: the memory's keys and values, encodings of distances."""

    @property
    def forward(self) -> float:
        """Operations of a forward pass."""
        return self.hidden + self.output

    @property
    def step(self) -> float:
        """Operations of a training step.

        Backward has two products for each of forward's, or one where an operand is constant.
        """
        return 3 * self.forward - self.constant


def count_flops(network: NetworkSettings, vocabulary: int, *, segment: int, memory: int, lanes: int) -> Flops:
    """Counts the operations of one token in a batch of `lanes` segments.

    All pairs of queries and keys are counted, masked ones too, although attention skips tiles of keys that no query of
    a tile can see.
    """
    inner, span = network.heads * network.head_width, segment + memory
    projections = 2 * network.width * inner * 3 + 2 * inner * network.width
    feed_forward = 2 * 2 * network.width * network.feed_forward
    attention = 3 * 2 * span * inner  # content scores, position scores, weighted values
    of_memory = 2 * network.width * inner * 2 * memory / segment
    of_distances = 2 * network.width * inner * span / (lanes * segment)
    constant = network.layers * (of_memory + of_distances)
    hidden = network.layers * (projections + feed_forward + attention) + constant
    return Flops(hidden, 2 * network.width * vocabulary, constant)
