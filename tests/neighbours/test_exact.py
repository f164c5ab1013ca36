"""The judge agrees with the obvious way."""

import numpy as np
import pytest
import torch

from spalm.neighbours import MISSING, Exclusion, nearest, workers
from spalm.neighbours import exact as module
from spalm.neighbours.exclusion import Askers
from spalm.neighbours.topk import Best
from spalm.neighbours.workers import in_turn
from support.arrays import Array, brute_force, clustered


@pytest.mark.parametrize("exclusion", [None, Exclusion(), Exclusion(window=3), Exclusion(document=True)])
def test_it_is_exact(monkeypatch, exclusion):
    monkeypatch.setattr(module, "_KEYS", 37)
    monkeypatch.setattr(module, "_QUERIES", 29)
    keys = Array(clustered(211, 5, 0), ids=np.arange(211) * 2)
    queries = Array(keys.keys(0, 211), keys._ids)

    askers = None if exclusion is None else Askers(keys._ids, keys._documents, exclusion)
    with workers(2) as in_parallel:
        rows, distances = nearest(queries.keys(0, 211).astype(np.float32), keys, 3, in_parallel, askers)
    np.testing.assert_allclose(distances, brute_force(keys, queries, 3, exclusion), rtol=1e-5, atol=1e-5)
    if exclusion is not None:
        assert not askers.forbid(np.arange(211)[:, None], keys._ids[rows], keys._documents[rows]).any()
    assert (np.diff(distances, axis=1) >= 0).all()
    assert all(len(set(row)) == 3 for row in rows.tolist())


def test_fewer_keys_than_wanted():
    keys = Array(clustered(2, 5, 0))
    rows, distances = nearest(np.zeros((1, 5), np.float32), keys, 4, in_turn)
    assert (rows[0, 2:] == MISSING).all()
    assert np.isinf(distances[0, 2:]).all()
    assert set(rows[0, :2]) == {0, 1}


def test_a_distant_centre_does_not_blur_small_distances():
    """Far from the origin, products of vectors lose digits; distances must not."""
    points = clustered(64, 8, 1).astype(np.float64) * 0.05 + 40
    keys = Array(points)
    _, distances = nearest(keys.keys(0, 64).astype(np.float32), keys, 1, in_turn)
    np.testing.assert_array_equal(distances[:, 0], 0)


def test_the_best_are_kept_whatever_the_order_of_offers():
    random = np.random.default_rng(2)
    products = random.standard_normal((5, 300)).astype(np.float32)
    half_norms = random.random(300).astype(np.float32)
    labels = np.arange(300)
    together, apart = Best(Askers.strangers(5), 7), [Best(Askers.strangers(5), 7) for _ in range(3)]
    for number, first in enumerate(random.permutation(range(0, 300, 20)).tolist()):
        part = slice(first, first + 20)
        query = random.permutation(5)
        shown = [torch.from_numpy(a) for a in (products[query, part], half_norms[part])]
        for best in (together, apart[number % 3]):
            best.offer(*shown, first, labels[part], labels[part], query)
    scores = products - half_norms
    order = np.argsort(-scores, axis=1)[:, :7]
    apart[0].take_in(apart[1:])
    for best in (together, apart[0]):
        np.testing.assert_array_equal(best.rows, order)
        np.testing.assert_array_equal(best.scores, np.take_along_axis(scores, order, 1))
