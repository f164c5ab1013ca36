"""Entries -> the K nearest entries of every position: exact search, bulk join, table, indexes for live queries.

The join is a tool of its own, too: `knn_graph` finds the nearest neighbours of vectors of any origin.
"""

from spalm.memory import MISSING
from spalm.neighbours.exact import exact_search
from spalm.neighbours.exclusion import Exclusion
from spalm.neighbours.graph.build import knn_graph
from spalm.neighbours.graph.neighbour_graph import NeighbourGraph, load_knn_graph
from spalm.neighbours.graph.settings import GraphOptions
from spalm.neighbours.index.build import IndexDescription, IndexSettings, make_searcher, open_searcher
from spalm.neighbours.index.contract import Index
from spalm.neighbours.index.kinds import IndexKind
from spalm.neighbours.index.searcher import Searcher
from spalm.neighbours.join.bulk_join import BulkJoin, NeighbourSettings
from spalm.neighbours.join.cost import RamBudget
from spalm.neighbours.join.stage import find_neighbours
from spalm.neighbours.parallel import serial_map, thread_map
from spalm.neighbours.table import NeighbourTable, drop_forgotten, drop_neighbours

__all__ = [
    "BulkJoin",
    "Exclusion",
    "GraphOptions",
    "Index",
    "IndexDescription",
    "IndexKind",
    "IndexSettings",
    "MISSING",
    "NeighbourGraph",
    "NeighbourSettings",
    "NeighbourTable",
    "RamBudget",
    "Searcher",
    "drop_forgotten",
    "drop_neighbours",
    "exact_search",
    "find_neighbours",
    "knn_graph",
    "load_knn_graph",
    "make_searcher",
    "open_searcher",
    "serial_map",
    "thread_map",
]
