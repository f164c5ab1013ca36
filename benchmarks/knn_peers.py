"""Libraries that make the graph of the k nearest neighbours: what `spalm.knn_graph` is compared with.

Every library is given all vectors as float32 in RAM, THREADS threads, and is timed for the whole job: building its
index and finding the neighbours of every vector. Each has several set-ups; the settings of a search are tried from
cheap to expensive until the recall is reached, which is not timed. A graph by nearest-neighbour descent is a whole job
for each setting. What a library compiles is compiled before, for other vectors.

ivf           faiss IndexIVFFlat, query by query                    (recall by the number of probes)
batch         faiss big_batch_search on the same, one list after another, with its prefetching threads
pca           the same on vectors of fewer dimensions (faiss.PCAMatrix), best candidates compared by whole vectors
nndescent     faiss IndexNNDescentFlat, whose graph is read
pynndescent   its neighbor_graph
hnsw          graphs of hnswlib, faiss (IndexHNSWFlat) and usearch (also with vectors in half precision or 8 bits, whose
              candidates are compared by whole vectors), built and then searched for every vector
scann         a tree of leaves with codes, re-ranked

faiss' NSG is not among them: it is built from a graph of neighbours, which is what is wanted here, by NNDescent.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

import faiss
import numpy as np

import peers
from peers import SetUp, timed
from spalm.compute import available_cores
from spalm.console import say
from spalm.memory import principal_axes
from spalm.neighbours.kernels import distances_to_single_rows
from spalm.neighbours.parallel import chunks

THREADS = available_cores()
"""Threads of every library."""
PROBES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
"""Numbers of lists searched."""
WIDENED = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]
"""Numbers of candidates that a search in a graph holds."""
_RERANKED = {0.8: 16, 0.9: 8, 0.95: 4, 0.99: 2}
"""Shares of the variance that fewer dimensions hold (0.95 is what our join has), and how many candidates are compared
by whole vectors after a search in them, in multiples of k."""
_RERANKED_ROUNDED = {"bf16": 2, "f16": 2, "i8": 4, "f32": 1}
"""The same after a search by rounded vectors."""


@dataclass(frozen=True)
class Candidate:
    """A set-up of a library that has not been built yet."""

    system: str
    """Name of the library and its method."""
    name: str
    """Name of the set-up."""
    build: Callable[[], SetUp]
    """Builds it, and returns it with the time that took."""
    warm: Callable[[], None] | None = None
    """Has the library compile what it compiles."""


def installed(name: str) -> bool:
    """Returns whether a library is there, with a message where it is not. It is imported when it is used."""
    if find_spec(name) is None:
        say(f"{name} is left out: it is not installed")
        return False
    return True


def candidates(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    """Yields every set-up of every library that is installed."""
    yield from _faiss_lists(keys, k)
    yield from _faiss_reduced(keys, k)
    yield from _faiss_descent(keys, k)
    yield from _pynndescent(keys, k)
    yield from _hnswlib(keys, k)
    yield from _faiss_hnsw(keys, k)
    yield from _usearch(keys, k)
    yield from _scann(keys, k)


def list_counts(size: int) -> list[int]:
    """Returns numbers of lists to try: about the square root of the number of vectors, twice and four times that."""
    root = 1 << round(np.log2(size**0.5))
    return [root, 2 * root, 4 * root]


class FaissLists:
    """An IndexIVFFlat of faiss, of whole vectors or of fewer dimensions, which is built when it is first asked for."""

    def __init__(self, keys: np.ndarray, k: int, lists: int, *, width: int | None = None, reranked: int = 1):
        self.keys, self.k, self.lists, self.width = keys, k, lists, width
        self._count = min(reranked * k + 1, len(keys))
        reduced = "" if width is None else f"PCA{width}, {reranked} times k re-ranked, "
        self.name = f"{reduced}IVF{lists}"
        self._seconds: float | None = None

    def _build(self) -> None:
        self._searched = self.keys
        if self.width is not None:
            axes = faiss.PCAMatrix(self.keys.shape[1], self.width)
            axes.train(self.keys[:: max(1, len(self.keys) // 65_536)])
            self._searched = axes.apply(self.keys)
        self._index: Any = faiss.index_factory(self._searched.shape[1], f"IVF{self.lists},Flat")
        means = self._index.cp
        means.niter, means.max_points_per_centroid, means.min_points_per_centroid = 10, 64, 1
        self._index.train(self._searched)
        self._index.add(self._searched)

    def set_up(self, threaded: int | None = None) -> SetUp:
        """Returns the set-up of the search of each query alone, or of big_batch_search in one of its three ways."""
        if self._seconds is None:
            self._seconds = timed(self._build)[0]
        together = None if threaded is None else partial(self._batch, threaded)
        return SetUp(self.name, self._seconds, PROBES, self._alone, together)

    def _alone(self, rows: np.ndarray, probes: int) -> np.ndarray:
        self._index.nprobe = probes
        return self._compared(rows, self._index.search(self._searched[rows], self._count)[1])

    def _batch(self, threaded: int, rows: np.ndarray, probes: int) -> np.ndarray:
        """Searches one list after another; with `threaded` 1 the next is fetched meanwhile, with 2 by more threads."""
        from faiss.contrib.big_batch_search import big_batch_search

        self._index.nprobe = probes
        with redirect_stdout(StringIO()):  # it prints a line for every list
            ids = big_batch_search(
                self._index,
                self._searched[rows],
                self._count,
                method="knn_function",
                knn=_knn_of_a_thread if threaded == 2 else faiss.knn,
                threaded=threaded,
                computation_threads=THREADS,
                verbose=0,
            )[1]
        return self._compared(rows, ids)

    def _compared(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Returns the nearest of the candidates by whole vectors, where fewer dimensions were searched."""
        return ids if self.width is None else nearest_of(self.keys, rows, ids, self.k + 1)


def nearest_of(keys: np.ndarray, rows: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """Returns the nearest `count` of the candidates `ids` of each row by whole vectors."""
    found = np.empty((len(rows), count), np.int64)

    def compare(part: tuple[int, int]) -> None:
        own = slice(*part)
        gaps = np.empty(ids[own].shape, np.float32)
        distances_to_single_rows(keys, ids[own], keys[rows[own]], gaps)
        found[own] = np.take_along_axis(ids[own], np.argsort(gaps, axis=1)[:, :count], 1)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(compare, chunks(0, len(rows), 4096)))
    return found


def _warm_comparison() -> None:
    """Has the comparison by whole vectors compiled."""
    some = np.zeros((2, 8), np.float32)
    nearest_of(some, np.arange(2), np.zeros((2, 2), np.int64), 1)


def _knn_of_a_thread(*arguments: Any, thread_id: int | None = None, **options: Any) -> Any:  # noqa: ARG001
    """Returns what faiss.knn does, which does not take the number that big_batch_search gives its threads."""
    faiss.omp_set_num_threads(1)  # of this thread only
    return faiss.knn(*arguments, **options)


def _faiss_lists(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    ways = {"big_batch_search": 0, "big_batch_search, prefetching": 1, "big_batch_search, threads": 2, "IVF": None}
    for count in list_counts(len(keys)):
        lists = FaissLists(keys, k, count)
        for way, threaded in ways.items():
            yield Candidate(f"faiss {way}", lists.name, partial(lists.set_up, threaded))


def _faiss_reduced(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    shares = principal_axes(np.array(keys[:: max(1, len(keys) // 16_384)])).shares
    widths = {-(-(int((shares < share).sum()) + 1) // 16) * 16: reranked for share, reranked in _RERANKED.items()}
    for width, reranked in widths.items():
        for count in list_counts(len(keys))[1:] if width < keys.shape[1] else []:
            lists = FaissLists(keys, k, count, width=width, reranked=reranked)
            for way, threaded in {"big_batch_search": 0, "big_batch_search, prefetching": 1}.items():
                build = partial(lists.set_up, threaded)
                yield Candidate(f"faiss {way}, PCA", lists.name, build, _warm_comparison)


def _whole_graph(name: str, make: Callable[[], np.ndarray]) -> SetUp:
    """Returns the set-up of a method that makes the graph of everything; each vector is put before its neighbours."""
    seconds, graph = timed(make)
    ids = np.column_stack([np.arange(len(graph)), graph])

    def read(rows: np.ndarray, setting: str) -> np.ndarray:  # noqa: ARG001
        return ids[rows]

    return SetUp(name, seconds, [""], read, read)


def _faiss_descent(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    for degree, rounds in ((max(2 * k, 16), 6), (max(2 * k, 32), 8), (max(3 * k, 64), 8)):
        name = f"K = {degree}, {rounds} rounds"

        def make(degree: int = degree, rounds: int = rounds) -> np.ndarray:
            index = faiss.IndexNNDescentFlat(keys.shape[1], degree, faiss.METRIC_L2)
            index.nndescent.iter, index.nndescent.S, index.nndescent.R = rounds, 10, 100
            index.nndescent.L = degree + 50
            index.add(keys)
            return faiss.vector_to_array(index.nndescent.final_graph).reshape(len(keys), degree)[:, :k]

        yield Candidate("faiss NNDescent", name, lambda name=name, make=make: _whole_graph(name, make))


def _pynndescent(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    if not installed("pynndescent"):
        return

    def graph_of(vectors: np.ndarray, degree: int) -> np.ndarray:
        library = import_module("pynndescent")
        graph, _ = library.NNDescent(vectors, n_neighbors=degree, random_state=1, n_jobs=THREADS).neighbor_graph
        return peers.without_itself(graph, np.arange(len(vectors)))[:, :k]

    def warm() -> None:
        graph_of(np.random.default_rng(0).standard_normal((5000, keys.shape[1]), np.float32), k + 1)

    for degree in sorted({k + 1, 2 * k + 1, max(3 * k, 15), max(3 * k, 30), max(4 * k, 60)}):
        name, make = f"n_neighbors = {degree}", partial(graph_of, keys, degree)
        yield Candidate("pynndescent", name, lambda name=name, make=make: _whole_graph(name, make), warm)


def _hnswlib(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    if not installed("hnswlib"):
        return
    for degree, effort in ((8, 64), (16, 100), (24, 200)):

        def build(degree: int = degree, effort: int = effort) -> SetUp:
            def make() -> Any:
                index = import_module("hnswlib").Index("l2", keys.shape[1])
                index.init_index(len(keys), M=degree, ef_construction=effort, random_seed=1)
                index.add_items(keys, num_threads=THREADS)
                return index

            seconds, index = timed(make)

            def search(rows: np.ndarray, wide: int) -> np.ndarray:
                index.set_ef(max(wide, k + 1))
                return index.knn_query(keys[rows], k + 1, num_threads=THREADS)[0].astype(np.int64)

            return SetUp(f"M = {degree}, ef_construction = {effort}", seconds, WIDENED, search)

        yield Candidate("hnswlib", f"M = {degree}, ef_construction = {effort}", build)


def _faiss_hnsw(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    for degree, effort in ((16, 64), (32, 100)):
        name = f"M = {degree}, efConstruction = {effort}"

        def build(degree: int = degree, effort: int = effort, name: str = name) -> SetUp:
            def make() -> Any:
                index: Any = faiss.IndexHNSWFlat(keys.shape[1], degree)
                index.hnsw.efConstruction = effort
                index.add(keys)
                return index

            seconds, index = timed(make)

            def search(rows: np.ndarray, wide: int) -> np.ndarray:
                index.hnsw.efSearch = max(wide, k + 1)
                return index.search(keys[rows], k + 1)[1]

            return SetUp(name, seconds, WIDENED, search)

        yield Candidate("faiss HNSW", name, build)


def _in_8_bits(keys: np.ndarray) -> np.ndarray:
    """Returns vectors as int8, all dimensions on one scale around their means, so that distances stay comparable."""
    some = keys[:: max(1, len(keys) // 16_384)]
    mean = some.mean(0)
    scale = 127 / np.quantile(np.abs(some - mean), 0.9995)
    parts = [slice(*part) for part in chunks(0, len(keys), 4096)]
    return np.concatenate([((keys[part] - mean) * scale).round().clip(-127, 127).astype(np.int8) for part in parts])


def _usearch(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    if not installed("usearch"):
        return
    kinds = ("bf16", 8, 64), ("bf16", 16, 128), ("f16", 16, 128), ("f32", 16, 128), ("i8", 8, 64), ("i8", 16, 128)
    for dtype, degree, effort in kinds:
        count = _RERANKED_ROUNDED[dtype] * k + 1
        reranked = f", {count // k} times k re-ranked" if count > k + 1 else ""
        name = f"{dtype}, connectivity = {degree}, expansion_add = {effort}{reranked}"

        def build(
            dtype: str = dtype, degree: int = degree, effort: int = effort, name: str = name, count: int = count
        ) -> SetUp:
            def make() -> Any:
                vectors = _in_8_bits(keys) if dtype == "i8" else keys
                index = import_module("usearch.index").Index(
                    ndim=keys.shape[1],
                    metric="l2sq",
                    dtype=dtype,
                    connectivity=degree,
                    expansion_add=effort,
                    enable_key_lookups=False,
                )
                index.add(np.arange(len(keys)), vectors, threads=THREADS)
                return index, vectors

            seconds, (index, vectors) = timed(make)

            def search(rows: np.ndarray, wide: int) -> np.ndarray:
                index.expansion_search = max(wide, count)
                found = index.search(vectors[rows], count, threads=THREADS)
                ids = np.asarray(found.keys).astype(np.int64)
                ids[np.arange(count) >= np.asarray(found.counts)[:, None]] = -1
                return nearest_of(keys, rows, ids, k + 1) if count > k + 1 else ids

            return SetUp(name, seconds, WIDENED, search)

        yield Candidate("usearch", name, build, _warm_comparison)


def _scann(keys: np.ndarray, k: int) -> Iterator[Candidate]:
    if not installed("scann"):
        return
    for leaves in list_counts(len(keys))[:2]:
        yield Candidate("ScaNN", f"{leaves} leaves", lambda leaves=leaves: next(peers.scann(keys, k, leaves))[1])
