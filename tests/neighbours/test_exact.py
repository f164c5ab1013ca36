"""The judge agrees with the obvious way."""

import numpy as np
import pytest
from arrays import Array, brute_force, clustered

from spalm.neighbours import NOTHING, Exclusion, nearest, workers
from spalm.neighbours import exact as module
from spalm.neighbours.best import Best, Candidates
from spalm.neighbours.workers import in_turn


@pytest.mark.parametrize("exclusion", [None, Exclusion(), Exclusion(window=3), Exclusion(document=True)])
def test_it_is_exact(monkeypatch, exclusion):
    monkeypatch.setattr(module, "_KEYS", 37)
    monkeypatch.setattr(module, "_QUERIES", 29)
    keys = Array(clustered(211, 5, 0), ids=np.arange(211) * 2)
    queries = Array(keys.keys(0, 211), keys._ids)

    def forbidden(query, row):
        return exclusion.forbids(keys._ids[query], keys._documents[query], keys._ids[row], keys._documents[row])

    mask = None if exclusion is None else forbidden
    with workers(2) as in_parallel:
        rows, distances = nearest(queries.keys(0, 211).astype(np.float32), keys, 3, in_parallel, mask)
    np.testing.assert_allclose(distances, brute_force(keys, queries, 3, exclusion), rtol=1e-5, atol=1e-5)
    if exclusion is not None:
        assert not mask(np.arange(211)[:, None], rows).any()
    assert (np.diff(distances, axis=1) >= 0).all()
    assert all(len(set(row)) == 3 for row in rows.tolist())


def test_fewer_keys_than_wanted():
    keys = Array(clustered(2, 5, 0))
    rows, distances = nearest(np.zeros((1, 5), np.float32), keys, 4, in_turn)
    assert (rows[0, 2:] == NOTHING).all()
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
    scores = random.standard_normal((5, 60)).astype(np.float32)
    best = Best(5, 7)
    for part in np.array_split(random.permutation(300), 9):
        query, row = part // 60, part % 60
        best.offer(Candidates(query, row, scores[query, row]))
    order = np.argsort(-scores, axis=1)[:, :7]
    np.testing.assert_array_equal(best.rows, order)
    np.testing.assert_array_equal(best.scores, np.take_along_axis(scores, order, 1))
