"""Encoded queries are read from several files as if they were one array."""

import numpy as np

from spalm.compute import JobPart
from spalm.neighbours.join.queries import EncodedQueries


def test_keys_are_read_across_files(tmp_path):
    keys = np.random.default_rng(0).standard_normal((13, 3)).astype("<f2")
    for number, first in enumerate(range(0, 13, 5)):
        keys[first : first + 5].tofile(tmp_path / JobPart(number, 0, 0).file_name)
    queries = EncodedQueries(tmp_path, count=13, width=3, size=5)
    np.testing.assert_array_equal(queries.keys(3, 12), keys[3:12])
    rows = np.array([[12, 0], [4, 5], [7, 7]])
    np.testing.assert_array_equal(queries.take(rows), keys[rows])
    assert queries.take(rows[:0]).shape == (0, 2, 3)
