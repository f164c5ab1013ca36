"""The making of a graph of neighbours: vectors are read once, searched, and the result is put where it belongs."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np

from spalm.artifact import Draft, Stage
from spalm.compute import Execution, parse_size
from spalm.console import say
from spalm.errors import InputError
from spalm.neighbours.graph.copies import find_copies
from spalm.neighbours.graph.given_vectors import VectorInput, open_vectors
from spalm.neighbours.graph.neighbour_graph import KIND, VERSION, NeighbourGraph, load_knn_graph
from spalm.neighbours.graph.search import NAME, GraphSearch, compares_all
from spalm.neighbours.graph.search_space import SearchSpace
from spalm.neighbours.graph.settings import GraphOptions, GraphSettings
from spalm.neighbours.graph.survey import Survey, survey_vectors
from spalm.neighbours.join.cost import RamBudget
from spalm.neighbours.scratch_files import map_array
from spalm.paths import user_path

_BYTES_OF_A_HASH = 48
"""Bytes for each vector while copies are looked for."""


def knn_graph(
    vectors: VectorInput,
    k: int = 15,
    *,
    queries: VectorInput | None = None,
    out: Path | str | None = None,
    execution: Execution | None = None,
    **options: Unpack[GraphOptions],
) -> NeighbourGraph:
    """Finds the k nearest neighbours of every vector among the others, or those of queries among the vectors.

    Everything but the result stays on disk: `ram` bounds what is in RAM besides an array that is there already. Up to
    4,096 vectors, or 1,024 queries, are searched exactly.

    Args:
        vectors: An array of shape (n, width) of float32, float16, bfloat16 (ml_dtypes, or a tensor), int8, uint8, or
            float64, which is rounded; or the path of a file .npy, .fvecs, .fbin, .f16bin, .bf16bin, .i8bin or .u8bin.
        k: Number of neighbours, up to 100. A vector is not its own neighbour.
        queries: Vectors whose neighbours are wanted; default: those of `vectors` themselves.
        out: Folder for the graph. A killed run is continued there, a finished one is opened. Default: the graph is
            returned in RAM, and what the search needs on disk is in the system's folder for temporary files.
        execution: Threads; default: all cores of this machine.
        **options: `recall` (0.95), `metric` ("l2", "ip" or "cosine"), `ram` ("4G" or bytes; default: half of this
            machine's), `seed`.
    """
    ram = options.pop("ram", None)
    settings = GraphSettings.parse({"k": k, **options}, "knn_graph")
    execution = execution or Execution()
    size = parse_size(ram, "ram =") if isinstance(ram, str) else ram
    budget = RamBudget.of(size if size is not None else execution.ram, execution.engine)
    given = [open_vectors(vectors, "vectors"), *([] if queries is None else [open_vectors(queries, "queries")])]
    if given[-1].width != given[0].width:
        raise InputError(
            f"{given[-1].name}: width {given[-1].width}, and the vectors have {given[0].width}; give the same"
        )
    few = compares_all(len(given[0]), len(given[-1]))
    hashed = not few and _BYTES_OF_A_HASH * len(given[0]) < budget.usable
    surveys = [survey_vectors(each, settings.metric, hashed=hashed and each is given[0]) for each in given]
    copies = None if surveys[0].hashes is None else find_copies(given[0], surveys[0].hashes)
    surveys = [replace(each, hashes=None) for each in surveys]  # they are not needed any more, and large
    space = SearchSpace.of(settings.metric, given, surveys)
    search = GraphSearch(settings, space, given, copies, budget, execution)
    if out is not None:
        return _make_in_folder(search, surveys, user_path(out))
    with TemporaryDirectory(prefix="spalm-knn-") as folder:
        found = search.run(Path(folder), Path(folder) / "work", more_disk=0)
        shape = search.positions, settings.k
        indices, distances = np.empty(shape, np.int64), np.empty(shape, np.float32)
        search.write(found, indices, distances)
    own = queries is None
    return NeighbourGraph(indices, distances, found.recall, found.judged, settings.metric, len(given[0]), own)


def _make_in_folder(search: GraphSearch, surveys: list[Survey], out: Path) -> NeighbourGraph:
    """Returns the graph at `out`: made now, continued, or found there."""
    names = ["vectors", "queries"]
    parents = {name: survey.digest for name, survey in zip(names, surveys)}

    def fill(draft: Draft) -> tuple[dict[str, Any], list[str]]:
        shape = search.positions, search.settings.k
        for suffix in ("ids", "distances"):
            draft.scratch(f"{NAME}.{suffix}")
        found = search.run(draft.directory, draft.scratch("work"), more_disk=12 * shape[0] * shape[1])
        arrays = [("indices", "<i8"), ("distances", "<f4")]
        indices, distances = (map_array(draft.directory / name, dtype, shape, mode="r+") for name, dtype in arrays)
        search.write(found, indices, distances)
        for name, dtype in arrays:
            draft.declare(name, dtype, shape)
        facts = {"recall": found.recall, "judged": found.judged, "vectors": len(search.given[0])}
        return {**facts, "width": search.given[0].width, **found.facts}, []

    restart = search.execution.restart
    Stage(KIND, VERSION, search.settings.as_json(), parents).make(out, fill, restart=restart)
    graph = load_knn_graph(out)
    say(f"{out}: recall {graph.recall:.3f}, measured on {graph.judged:,} rows")
    return graph
