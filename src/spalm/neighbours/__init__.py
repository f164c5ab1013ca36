"""Entries in, the K nearest of every position out: exact search, the bulk join, the table, indexes for live queries."""

from spalm.neighbours.exact import nearest
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.index.contract import Index, Kind
from spalm.neighbours.index.searcher import Searcher, make_searcher, open_searcher
from spalm.neighbours.join.cost import Budget
from spalm.neighbours.join.stage import NeighbourSettings, find_neighbours
from spalm.neighbours.kernels import MISSING
from spalm.neighbours.table import NeighbourTable, without
from spalm.neighbours.workers import workers

__all__ = [
    "Budget",
    "Exclusion",
    "Index",
    "Kind",
    "MISSING",
    "NeighbourSettings",
    "NeighbourTable",
    "Searcher",
    "find_neighbours",
    "make_searcher",
    "nearest",
    "open_searcher",
    "without",
    "workers",
]
