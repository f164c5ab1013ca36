"""Settings of a graph of neighbours."""

from typing import TypedDict

from pydantic import Field

from spalm.choices import MetricName
from spalm.settings import Seed, Settings

MOST_NEIGHBOURS = 100
"""Highest number of neighbours of a vector."""


class GraphSettings(Settings):
    """Settings that decide what is in a graph."""

    k: int = Field(default=15, gt=0, le=MOST_NEIGHBOURS)
    """Number of neighbours of every vector."""
    recall: float = Field(default=0.95, gt=0, le=1)
    """Share of the true neighbours to be found, measured on a sample."""
    metric: MetricName = "l2"
    """l2: Euclidean distance; cosine: 1 - cosine; ip: the greatest inner products."""
    seed: Seed = 1
    """Seed of the random samples and of the partitions."""


class GraphOptions(TypedDict, total=False):
    """Options of `knn_graph`, all of which have defaults."""

    recall: float
    """Share of the true neighbours to be found, measured on a sample; default: 0.95."""
    metric: MetricName
    """l2 (default), ip or cosine."""
    ram: int | str | None
    """RAM that may be used, in bytes or such as "4G"; default: half of this machine's."""
    seed: int
    """Seed of the random samples and of the partitions; default: 1."""
