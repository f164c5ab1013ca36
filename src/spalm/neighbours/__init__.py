"""Entries in, the K nearest of every position out: exact search, the bulk join, the table, indexes for live queries."""

from spalm.neighbours.budget import Budget, half_of_the_machine, parse_size, ram_of_the_machine
from spalm.neighbours.bulk import NeighbourSettings, find_neighbours
from spalm.neighbours.exact import nearest
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.index import Index, Kind
from spalm.neighbours.kernels import NOTHING
from spalm.neighbours.search import Searcher, make_searcher, open_searcher
from spalm.neighbours.table import NeighbourTable, without
from spalm.neighbours.workers import workers

__all__ = [
    "NOTHING",
    "Budget",
    "Exclusion",
    "Index",
    "Kind",
    "NeighbourSettings",
    "NeighbourTable",
    "Searcher",
    "find_neighbours",
    "make_searcher",
    "open_searcher",
    "half_of_the_machine",
    "nearest",
    "parse_size",
    "ram_of_the_machine",
    "without",
    "workers",
]
