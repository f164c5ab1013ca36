"""Exact search agrees with brute force."""

import numpy as np
import pytest
import torch

from spalm.neighbours import MISSING, Exclusion, exact_search, serial_map, thread_map
from spalm.neighbours import exact as module
from spalm.neighbours.exclusion import QueryExclusion
from spalm.neighbours.topk import TopK
from support.arrays import Array, brute_force, clustered


@pytest.mark.parametrize("exclusion", [None, Exclusion(), Exclusion(window=3), Exclusion(document=True)])
def test_it_is_exact(monkeypatch, exclusion):
    monkeypatch.setattr(module, "_KEYS", 37)
    monkeypatch.setattr(module, "_QUERIES", 29)
    keys = Array(clustered(211, 5, 0), ids=np.arange(211) * 2)
    queries = Array(keys.keys(0, 211), keys._ids)

    excluded = None if exclusion is None else QueryExclusion(keys._ids, keys._documents, exclusion)
    with thread_map(2) as parallel:
        rows, distances = exact_search(
            queries.keys(0, 211).astype(np.float32), keys, 3, parallel=parallel, exclusion=excluded
        )
    np.testing.assert_allclose(distances, brute_force(keys, queries, 3, exclusion), rtol=1e-5, atol=1e-5)
    if excluded is not None:
        assert not excluded.forbids(np.arange(211)[:, None], keys._ids[rows], keys._documents[rows]).any()
    assert (np.diff(distances, axis=1) >= 0).all()
    assert all(len(set(row)) == 3 for row in rows.tolist())


def test_fewer_keys_than_wanted():
    keys = Array(clustered(2, 5, 0))
    rows, distances = exact_search(np.zeros((1, 5), np.float32), keys, 4, parallel=serial_map)
    assert (rows[0, 2:] == MISSING).all()
    assert np.isinf(distances[0, 2:]).all()
    assert set(rows[0, :2]) == {0, 1}


def test_a_distant_centre_does_not_blur_small_distances():
    """Far from the origin, products of vectors lose digits; distances must not."""
    points = clustered(64, 8, 1).astype(np.float64) * 0.05 + 40
    keys = Array(points)
    _, distances = exact_search(keys.keys(0, 64).astype(np.float32), keys, 1, parallel=serial_map)
    np.testing.assert_array_equal(distances[:, 0], 0)


def test_the_best_are_kept_whatever_the_order_of_blocks():
    random = np.random.default_rng(2)
    products = random.standard_normal((5, 300)).astype(np.float32)
    half_norms = random.random(300).astype(np.float32)
    labels = np.arange(300)
    nothing = QueryExclusion.nothing(5)
    together, apart = TopK(nothing, 7), [TopK(nothing, 7) for _ in range(3)]
    for number, first in enumerate(random.permutation(range(0, 300, 20)).tolist()):
        part = slice(first, first + 20)
        query = random.permutation(5)
        scored, norms = (torch.from_numpy(a) for a in (products[query, part], half_norms[part]))
        for best in (together, apart[number % 3]):
            best.push(query, scored, first, half_norms=norms, labels=labels[part], documents=labels[part])
    scores = products - half_norms
    order = np.argsort(-scores, axis=1)[:, :7]
    apart[0].merge(apart[1:])
    for best in (together, apart[0]):
        np.testing.assert_array_equal(best.rows, order)
        np.testing.assert_array_equal(best.scores, np.take_along_axis(scores, order, 1))
