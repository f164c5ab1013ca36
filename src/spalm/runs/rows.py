"""The rows of a run's results: which there are, what each is made of, and what it is compared with."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from spalm.choices import HeldOut, NetworkName, RowName

Source = Literal["neighbours", "matches"]
"""A source of evidence in the memory: nearest contexts, or exact matches."""
NETWORKS: tuple[NetworkName, ...] = get_args(NetworkName)
"""The networks that are trained, in order."""
KEY_NETWORK: Final = "transformer"
"""The network whose hidden states are the keys of the long-term memory. It has no memory itself."""
REFERENCE_ROW: Final = "transformer-xl"
"""The row with a short-term memory only, with which rows that have a long-term memory are compared."""
HELD_OUT: tuple[HeldOut, ...] = get_args(HeldOut)
"""The splits on which every row is scored."""


@dataclass(frozen=True)
class Row:
    """A network and the way in which the long-term memory is combined with it."""

    name: RowName
    network: NetworkName
    """Network that the row is made of. The row with the network's own name scores it without a mixture."""
    mixture: Literal["knn", "adaptive"] | None = None
    """Mixture of probabilities on top of the network's own row: kNN-LM's fixed weight, or one for each position."""
    sources: tuple[Source, ...] = ("neighbours",)
    """Sources of the memory that the mixture weighs."""
    compared_with: RowName | None = None
    """Row against which the significance of this one is tested."""

    @property
    def gated(self) -> bool:
        """Whether retrieved tokens reach the network's output through the paper's gate."""
        return self.network == "spalm"

    @property
    def uses_matches(self) -> bool:
        """Whether exact matches are among the sources."""
        return "matches" in self.sources

    @property
    def has_memory(self) -> bool:
        """Whether the row uses the long-term memory at all."""
        return self.gated or self.mixture is not None


ROWS: dict[RowName, Row] = {
    row.name: row
    for row in (
        Row("transformer", "transformer"),
        Row("transformer-xl", "transformer-xl"),
        Row("knn-lm", "transformer-xl", "knn", compared_with=REFERENCE_ROW),
        Row("spalm", "spalm", compared_with=REFERENCE_ROW),
        Row("spalm+knn", "spalm", "knn", compared_with=REFERENCE_ROW),
        Row("spalm-adaptive", "spalm", "adaptive", compared_with=REFERENCE_ROW),
        Row("nearest", "transformer-xl", "adaptive", compared_with=REFERENCE_ROW),
        Row("exact", "transformer-xl", "adaptive", sources=("matches",), compared_with=REFERENCE_ROW),
        Row("adaptive", "transformer-xl", "adaptive", sources=("neighbours", "matches"), compared_with=REFERENCE_ROW),
    )
}
"""All rows, in the order of the table: first the paper's, then those beyond it."""
