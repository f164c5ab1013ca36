"""Peers of our join, which find the same neighbours: faiss, ScaNN, and a join of cluster pairs.

Every peer is given all keys as float32 in RAM and finds the neighbours of every key. A set-up (partitions, how they are
trained) is built once; its search settings are tried from cheap to expensive on a sample of queries until the recall is
reached, and that setting is timed. Searches that treat queries one by one are timed on some of them and scaled up.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import faiss
import numpy as np

from spalm.console import say

ALONE = 50_000
"""Number of queries on which a search that treats them one by one is timed."""


@dataclass(frozen=True)
class Truth:
    """Sampled queries with the distance of their K-th true neighbour. A query is not its own neighbour."""

    rows: np.ndarray
    """Rows of the queries among the keys."""
    kth: np.ndarray
    """Squared distance of the K-th true neighbour of each query."""

    @classmethod
    def of(cls, keys: np.ndarray, neighbours: int, count: int, seed: int) -> "Truth":
        """Returns the truth for `count` random queries, by exact search."""
        rows = np.sort(np.random.default_rng(seed).choice(len(keys), count, replace=False))
        ids = faiss.knn(keys[rows], keys, neighbours + 1)[1]
        return cls(rows, np.sort(_distances(keys, rows, without_itself(ids, rows)), axis=1)[:, -1])

    def recall(self, keys: np.ndarray, ids: np.ndarray) -> float:
        """Returns the share of neighbours that are no further away than the true K-th; ties count as found."""
        return float((_distances(keys, self.rows, ids) <= self.kth[:, None] * (1 + 1e-4) + 1e-4).mean())


def _distances(keys: np.ndarray, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    gaps = ((keys[ids.clip(0)] - keys[rows][:, None]) ** 2).sum(2)
    return np.where(ids < 0, np.inf, gaps)


def without_itself(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the found ids without the query's own row, or without the last one where it was not found."""
    own = ids == rows[:, None]
    own[~own.any(1), -1] = True
    first = np.zeros_like(own)
    first[np.arange(len(own)), own.argmax(1)] = True
    return ids[~first].reshape(len(ids), -1)


@dataclass(frozen=True)
class SetUp:
    """A peer that has been built, with the search settings to try."""

    name: str
    build_seconds: float
    settings: list[Any]
    """Search settings, from cheap to expensive."""
    sample: Callable[[np.ndarray, Any], np.ndarray]
    """Searches for sampled rows: (rows, setting) -> ids, the query itself among them."""
    together: Callable[[np.ndarray, Any], np.ndarray] | None = None
    """Searches for all rows at once, where the peer does that in another way."""

    def seconds(self, setting: Any, count: int) -> float:
        """Returns the time of searching for every key."""
        if self.together is not None:
            return timed(self.together, np.arange(count), setting)[0]
        part = np.random.default_rng(0).permutation(count)[:ALONE]
        return timed(self.sample, part, setting)[0] * count / len(part)


def measure(
    set_up: SetUp, keys: np.ndarray, truth: Truth, targets: list[float], *, longest: float = math.inf
) -> Iterator[tuple[float, float, str]]:
    """Yields (recall, seconds of the whole job, settings) for each target; the last may fall short of its target.

    With `longest`, a job is not timed, and its seconds are infinite, if it falls short of its target or if it treats
    queries one by one and the sampled ones let expect that it takes more than twice as long.
    """
    settings = iter(set_up.settings)
    recall, setting, expected, timed_at, seconds = 0.0, None, 0.0, None, 0.0
    for target in targets:
        while recall < target and (following := next(settings, None)) is not None:
            setting = following
            sampled, ids = timed(set_up.sample, truth.rows, setting)
            expected = set_up.build_seconds + sampled * len(keys) / len(truth.rows)
            recall = truth.recall(keys, without_itself(ids, truth.rows))
        name = f"{set_up.name}, {setting}".removesuffix(", ")
        too_long = set_up.together is None and expected > 2 * longest
        if longest < math.inf and (recall < target or too_long):
            yield recall, math.inf, name + (f", about {expected:.0f} s by {len(truth.rows):,} queries" * too_long)
        else:
            if timed_at != setting:
                seconds, timed_at = set_up.build_seconds + set_up.seconds(setting, len(keys)), setting
            yield recall, seconds, name
        if recall < target:
            return


def timed(function: Callable, *arguments) -> tuple[float, Any]:
    """Returns the seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - began, result


def _index(keys: np.ndarray, factory: str, iterations: int, points: int) -> tuple[float, Any]:
    def build() -> Any:
        index = faiss.index_factory(keys.shape[1], factory)
        inner = faiss.extract_index_ivf(index)
        inner.cp.niter, inner.cp.max_points_per_centroid, inner.cp.min_points_per_centroid = iterations, points, 1
        index.train(keys)
        index.add(keys)
        return index

    return timed(build)


def ivf(
    keys: np.ndarray, neighbours: int, partitions: int, iterations: int, points: int
) -> Iterator[tuple[str, SetUp]]:
    """Yields IVF, searched query by query and by big_batch_search."""
    from faiss.contrib.big_batch_search import big_batch_search

    seconds, index = _index(keys, f"IVF{partitions},Flat", iterations, points)
    name = f"IVF{partitions} ({iterations} iterations, {points} points a centroid)"

    def search(rows: np.ndarray, probes: int) -> np.ndarray:
        index.nprobe = probes
        return index.search(keys[rows], neighbours + 1)[1]

    def batch(rows: np.ndarray, probes: int) -> np.ndarray:
        index.nprobe = probes
        with redirect_stdout(StringIO()):  # it prints a line for every partition
            return big_batch_search(index, keys[rows], neighbours + 1, method="knn_function", threaded=0, verbose=0)[1]

    yield "faiss IVF", SetUp(name, seconds, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32], search)
    yield "faiss big_batch_search", SetUp(name, seconds, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32], search, batch)


def fast_scan(keys: np.ndarray, neighbours: int, partitions: int) -> Iterator[tuple[str, SetUp]]:
    """Yields IVF with 4-bit codes, re-ranked with the keys."""
    codes = keys.shape[1] // 2
    seconds, index = _index(keys, f"IVF{partitions},PQ{codes}x4fs,RFlat", 10, 64)

    def search(rows: np.ndarray, probes: int) -> np.ndarray:
        faiss.extract_index_ivf(index).nprobe = probes
        index.k_factor = 16
        return index.search(keys[rows], neighbours + 1)[1]

    yield (
        "faiss IVF fast scan",
        SetUp(f"IVF{partitions},PQ{codes}x4fs, 16 times K re-ranked", seconds, [2, 4, 8, 16, 32], search),
    )


def knn_lm(keys: np.ndarray, neighbours: int) -> Iterator[tuple[str, SetUp]]:
    """Yields the kNN-LM recipe: IVF4096,PQ64 and 32 probes. Its training is cut short, to its advantage in time."""
    seconds, index = _index(keys, "IVF4096,PQ64", 4, 64)

    def search(rows: np.ndarray, probes: int) -> np.ndarray:
        index.nprobe = probes
        return index.search(keys[rows], neighbours + 1)[1]

    yield "kNN-LM recipe", SetUp("IVF4096,PQ64", seconds, [32], search)


def cluster_pairs(keys: np.ndarray, neighbours: int, partitions: int) -> Iterator[tuple[str, SetUp]]:
    """Yields the search of each partition's keys among those of its nearest partitions, with faiss.knn."""

    def build() -> tuple[list[np.ndarray], np.ndarray]:
        means: Any = faiss.Kmeans(
            keys.shape[1], partitions, niter=10, max_points_per_centroid=64, min_points_per_centroid=1
        )
        means.train(keys)
        member = means.index.search(keys, 1)[1][:, 0]
        order = np.argsort(member, kind="stable")
        rows = np.split(order, np.searchsorted(member[order], np.arange(1, partitions)))
        return rows, means.index.search(means.centroids, 64)[1]

    seconds, (rows, near) = timed(build)

    def together(wanted: np.ndarray, probes: int) -> np.ndarray:
        found = np.full((len(keys), neighbours + 1), -1, np.int64)
        is_wanted = np.isin(np.arange(len(keys)), wanted)
        for partition, own in enumerate(rows):
            own = own[is_wanted[own]]
            if len(own):
                others = np.concatenate([rows[other] for other in near[partition, :probes]])
                ids = faiss.knn(keys[own], keys[others], min(neighbours + 1, len(others)))[1]
                found[own, : ids.shape[1]] = others[ids]
        return found[wanted]

    name = f"{partitions} partitions"
    yield "cluster pairs", SetUp(name, seconds, [2, 4, 6, 8, 12, 16], together, together)


def scann(keys: np.ndarray, neighbours: int, leaves: int) -> Iterator[tuple[str, SetUp]]:
    """Yields ScaNN: a tree of leaves with codes. A setting is (leaves searched, candidates re-ranked)."""
    try:
        import scann as library  # pyright: ignore[reportMissingImports]
    except ImportError:
        say("ScaNN is left out: pip install 'spalm[scann]' to compare with it")
        return

    def build():
        builder = library.scann_ops_pybind.builder(keys, neighbours + 1, "squared_l2")
        tree = builder.tree(num_leaves=leaves, num_leaves_to_search=10, training_sample_size=250_000)
        return tree.score_ah(2, anisotropic_quantization_threshold=float("nan")).reorder(100).build()

    seconds, searcher = timed(build)

    def search(rows: np.ndarray, setting: tuple[int, int]) -> np.ndarray:
        ids, _ = searcher.search_batched_parallel(
            keys[rows], leaves_to_search=setting[0], pre_reorder_num_neighbors=setting[1]
        )
        return np.where(ids < len(keys), ids, -1).astype(np.int64)  # where it has found fewer

    pairs = [(4, 60), (8, 100), (16, 200), (32, 200), (32, 400), (64, 800), (128, 1600)]
    yield "ScaNN", SetUp(f"{leaves} leaves, AH, (searched, re-ranked)", seconds, pairs, search)


def set_ups(keys: np.ndarray, neighbours: int) -> Iterator[tuple[str, SetUp]]:
    """Yields all set-ups one after another, so that only one is in RAM at a time."""
    yield from ivf(keys, neighbours, 1024, 10, 64)
    yield from ivf(keys, neighbours, 2048, 10, 64)
    yield from ivf(keys, neighbours, 4096, 4, 40)
    yield from fast_scan(keys, neighbours, 2048)
    yield from cluster_pairs(keys, neighbours, 2048)
    yield from scann(keys, neighbours, 2000)
    yield from knn_lm(keys, neighbours)
