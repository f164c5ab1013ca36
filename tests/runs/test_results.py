"""Significance and passages, on numbers small enough to check by hand."""

from io import StringIO
from math import erfc, sqrt

import numpy as np
import pytest
from rich.console import Console

from spalm.corpus import TokenStream
from spalm.runs import PaperRow, print_results, where_memory_helped, wilcoxon


def test_wilcoxon_by_hand():
    """Differences 1, 2, -3, 4, 5, 6: positive ranks sum to 18 of 21, mean 10.5, variance 6 * 7 * 13 / 24."""
    one = np.array([1.0, 2.0, -3.0, 4.0, 5.0, 6.0])
    z = (18 - 10.5) / (6 * 7 * 13 / 24) ** 0.5

    assert wilcoxon(one, np.zeros(6)) == pytest.approx(erfc(z / sqrt(2)), rel=1e-6)
    assert wilcoxon(one, one) == 1.0
    assert wilcoxon(np.zeros(6), one) == pytest.approx(wilcoxon(one, np.zeros(6)))


class StubRecords:
    """Stands for the records of one split."""

    def __init__(self, log_probabilities):
        self._log_probabilities = np.array(log_probabilities, np.float32)

    def log_probabilities(self, split):
        assert split == "test"
        return self._log_probabilities


def test_the_passage_is_where_the_gain_is_largest():
    reference = StubRecords([-3.0] * 10)
    better = StubRecords([-3, -3, -1, -3, -2, -1, -2, -3, -3, -3])
    one, two = (TokenStream(np.zeros(10, int), np.array(ends), list, start=0) for ends in ([10], [5, 10]))
    one.split = two.split = "test"
    np.testing.assert_array_equal(where_memory_helped(one, better, reference, length=3), [4, 5, 6])
    np.testing.assert_array_equal(where_memory_helped(one, better, reference, length=99), np.arange(10))
    np.testing.assert_array_equal(where_memory_helped(two, better, reference, length=3), [2, 3, 4])
    np.testing.assert_array_equal(where_memory_helped(two, better, reference, length=2), [5, 6])


def test_the_table_says_what_it_shows():
    row = {
        "model": "spalm+knn",
        "dev": 12.345,
        "test": 13.456,
        "unit": "perplexity/word",
        "parameters": 1_400_000,
        "memory_length": 512,
        "neighbours": 1024,
        "lambda": 0.25,
        "without_long_term_memory": {"dev": 20.0, "test": 21.987},
        "p_against_transformer_xl": 3e-12,
        "more_texts_in_memory": 1,
    }
    console = Console(width=100, record=True, file=StringIO())
    paper = [PaperRow(model="spalm+knn", memory_length=512, dev=17.6, test=18.0)]
    print_results([row], "A title", paper, console=console)
    text = console.export_text()
    for part in (
        "A title",
        "spalm+knn",
        "512",
        "1.4M",
        "0.25",
        "1,024",
        "12.35",
        "13.46",
        "21.99",
        "<1e-9",
        "17.6",
        "18.0",
        "not the static figures",
    ):
        assert part in text, part
