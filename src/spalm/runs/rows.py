"""The rows of a run's results: which there are, what each is made of, and what it is compared with."""

from dataclasses import dataclass
from typing import Literal

NetworkName = Literal["transformer", "transformer-xl", "spalm"]
NETWORKS: tuple[NetworkName, ...] = ("transformer", "transformer-xl", "spalm")
"""The networks that are trained, in order. The transformer also makes the keys of the long-term memory."""
RowName = Literal["transformer", "transformer-xl", "knn-lm", "spalm", "spalm+knn", "spalm-adaptive"]
HeldOut = Literal["dev", "test"]
HELD_OUT: tuple[HeldOut, ...] = ("dev", "test")
"""The splits on which every row is scored."""


@dataclass(frozen=True)
class Row:
    """A network and the way in which the long-term memory is combined with it."""

    name: RowName
    network: NetworkName
    mixture: Literal["knn", "adaptive"] | None = None
    """Mixture of probabilities on top of the network's own row: kNN-LM's fixed weight, or one for each position."""
    compared_with: RowName | None = None
    """Row against which its significance is tested."""

    @property
    def gate_log_probabilities(self) -> bool:
        """Whether retrieved tokens reach the network's output through the paper's gate."""
        return self.network == "spalm"

    @property
    def has_memory(self) -> bool:
        """Whether it uses the long-term memory at all."""
        return self.gated or self.mixture is not None


ROWS: dict[RowName, Row] = {
    row.name: row
    for row in (
        Row("transformer", "transformer"),
        Row("transformer-xl", "transformer-xl"),
        Row("knn-lm", "transformer-xl", "knn", compared_with="transformer-xl"),
        Row("spalm", "spalm", compared_with="transformer-xl"),
        Row("spalm+knn", "spalm", "knn", compared_with="transformer-xl"),
        Row("spalm-adaptive", "spalm", "adaptive", compared_with="transformer-xl"),
    )
}
DEFAULT_ROW: RowName = "spalm-adaptive"
"""The row that generates and is served unless another is named."""
