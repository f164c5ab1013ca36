"""The rows of a run's results: which there are, what each is made of, and what it is compared with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from spalm.choices import HeldOut, NetworkName, RowName

Source = Literal["neighbours", "matches"]
"""A source of evidence in the memory: nearest contexts, or exact matches."""
NETWORKS: tuple[NetworkName, ...] = get_args(NetworkName)
"""The networks that are trained, in order."""
PlainNetwork = Literal["transformer", "transformer-xl"]
"""A network without a gate. The others have one, which transformer-xl-restarted does not use."""
GATED_NETWORKS: tuple[NetworkName, ...] = ("spalm", "spalm-literal", "spalm-extended")
"""The networks in which retrieved tokens pass through the paper's gate, or an extended one."""
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
    overlapping: bool = False
    """Whether windows overlap by three quarters at least, so that every token has that much left context."""
    literal: bool = False
    """Whether the row keeps to the paper's equations and grid as they are written."""
    asked_by: Literal["controls", "extended"] | None = None
    """Setting of the recipe with which alone the row is made, because a network is trained for it; None: always."""

    @property
    def gated(self) -> bool:
        """Whether retrieved tokens reach the network's output through a gate."""
        return self.network in GATED_NETWORKS

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
        Row("transformer-overlap", "transformer", overlapping=True),
        Row("transformer-xl", "transformer-xl"),
        Row("transformer-xl-restarted", "transformer-xl-restarted", compared_with=REFERENCE_ROW, asked_by="controls"),
        Row("knn-lm-literal", "transformer-xl", "knn", compared_with=REFERENCE_ROW, literal=True),
        Row("knn-lm", "transformer-xl", "knn", compared_with=REFERENCE_ROW),
        Row("spalm-literal", "spalm-literal", compared_with=REFERENCE_ROW, literal=True, asked_by="controls"),
        Row("spalm", "spalm", compared_with=REFERENCE_ROW),
        Row("spalm+knn", "spalm", "knn", compared_with=REFERENCE_ROW),
        Row("spalm-extended", "spalm-extended", compared_with=REFERENCE_ROW, asked_by="extended"),
        Row("spalm-adaptive", "spalm", "adaptive", compared_with=REFERENCE_ROW),
        Row("nearest", "transformer-xl", "adaptive", compared_with=REFERENCE_ROW),
        Row("exact", "transformer-xl", "adaptive", sources=("matches",), compared_with=REFERENCE_ROW),
        Row("adaptive", "transformer-xl", "adaptive", sources=("neighbours", "matches"), compared_with=REFERENCE_ROW),
    )
}
"""All rows, in the order of the table: first the paper's, each after its controls, then those beyond it."""


def networks_of(rows: Iterable[RowName]) -> list[NetworkName]:
    """Returns the networks that rows are made of, in the order of training."""
    used = {ROWS[name].network for name in rows}
    return [name for name in NETWORKS if name in used]
