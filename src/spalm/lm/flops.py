"""What a network computes for a token, counted: matrix products only, two operations for each multiply-add."""

from dataclasses import dataclass

from spalm.lm.transformer import NetworkSettings


@dataclass(frozen=True)
class Flops:
    """Of a token, on average over a segment."""

    hidden: float
    """Its hidden state."""
    output: float
    """Its distribution, where the softmax is not adaptive."""
    constant: float
    """The part of `hidden` whose operands get no gradient: the memory's keys and values, encodings of distances."""

    @property
    def forward(self) -> float:
        return self.hidden + self.output

    @property
    def step(self) -> float:
        """Forward and backward, which has two products for each of forward's, or one where an operand is constant."""
        return 3 * self.forward - self.constant


def count_flops(network: NetworkSettings, vocabulary: int, segment: int, memory: int, lanes: int) -> Flops:
    """Queries are handled in tiles of 128 with the keys that a tile can see; counted are all pairs, masked ones too."""
    inner, span = network.heads * network.head_width, segment + memory
    projections = 2 * network.width * inner * 3 + 2 * inner * network.width
    feed_forward = 2 * 2 * network.width * network.feed_forward
    attention = 3 * 2 * span * inner  # content scores, position scores, weighted values
    of_memory = 2 * network.width * inner * 2 * memory / segment
    of_distances = 2 * network.width * inner * span / (lanes * segment)
    constant = network.layers * (of_memory + of_distances)
    hidden = network.layers * (projections + feed_forward + attention) + constant
    return Flops(hidden, 2 * network.width * vocabulary, constant)
