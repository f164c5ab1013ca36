"""BM25 against the formula written down as it stands, while documents come and go."""

import math
from collections import Counter

import numpy as np
import pytest

from spalm.errors import InputError
from spalm.generation.passages import Bm25Index, Bm25Settings, bm25, words_of

Place = tuple[int, int, int]
WORDS = [f"w{number}" for number in range(23)]


def oracle(paragraphs: dict[Place, list[str]], question: list[str], settings: Bm25Settings) -> dict[Place, float]:
    """Returns the scores of all paragraphs that share a word with the question."""
    mean = sum(map(len, paragraphs.values())) / len(paragraphs) if paragraphs else 0
    scores: dict[Place, float] = {}
    for place, words in paragraphs.items():
        for word in {*question} & {*words}:
            n = sum(word in other for other in paragraphs.values())
            idf = math.log(1 + (len(paragraphs) - n + 0.5) / (n + 0.5))
            f = Counter(words)[word]
            norm = settings.k1 * (1 - settings.b + settings.b * len(words) / mean)
            scores[place] = scores.get(place, 0) + idf * f * (settings.k1 + 1) / (f + norm)
    return scores


def agree(index: Bm25Index, paragraphs: dict[Place, list[str]], question: list[str], settings: Bm25Settings) -> None:
    expected = oracle(paragraphs, question, settings)
    found = index.best(question, 1000)
    assert {place: pytest.approx(score) for place, score in found} == expected
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for count in (1, 3):
        assert index.best(question, count) == found[:count]


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.9, 0.0), (0.0, 0.5), (2.0, 1.0)])
def test_scores_are_those_of_the_formula_whatever_was_added_and_removed(k1, b, monkeypatch):
    monkeypatch.setattr(bm25, "_LARGEST_SEGMENT", 100)
    random, settings = np.random.default_rng(5), Bm25Settings(k1=k1, b=b)
    index, held = Bm25Index(settings), dict[Place, list[str]]()
    for step in range(60):
        if step % 3 == 2:
            documents = sorted({place[0] for place in held})
            gone = random.choice(documents, min(len(documents), 4), replace=False)
            index.remove(gone)
            held = {place: words for place, words in held.items() if place[0] not in gone}
        else:
            count = int(random.integers(3, 12))
            places = [(1000 * step + number // 2, 10 * number, 10 * number + 7) for number in range(count)]
            texts = [random.choice(WORDS, random.integers(0, 14)).tolist() for _ in places]
            index.add(np.array(places), texts)
            held |= dict(zip(places, texts))
        assert len(index) == len(held)
        agree(index, held, [*random.choice(WORDS, 3).tolist(), "nowhere"], settings)
    assert len(index.segments) > 1
    sizes = [len(segment.holders) for segment in index.segments]
    assert max(sizes) <= 100 + 12 * 14


def test_additions_one_by_one_leave_few_segments():
    index = Bm25Index(Bm25Settings())
    for number in range(257):
        index.add(np.array([(number, 0, 3)]), [["a", f"b{number}"]])
    assert len(index.segments) < 12
    assert [place[0] for place, _ in index.best(["b77", "a"], 3)] == [77, 0, 1], "ties go by age"


def test_nothing_of_a_removed_document_is_left():
    index = Bm25Index(Bm25Settings())
    index.add(np.array([(0, 0, 2), (5, 0, 2)]), [["common", "secret"], ["common", "other"]])
    index.remove(np.array([0]))
    (segment,) = index.segments
    assert hash("secret") not in segment.words.tolist()
    assert segment.places.tolist() == [[5, 0, 2]]
    assert len(segment.holders) == len(segment.counts) == 2
    index.remove(np.array([5]))
    assert index.segments == []
    assert index.best(["common"], 3) == []


def test_words_are_compared_in_lower_case_without_signs():
    assert words_of("The café's 3 Cats,\nÄPFEL!") == ["the", "café", "s", "3", "cats", "äpfel"]
    assert words_of("...") == []


def test_an_empty_index_finds_nothing():
    index = Bm25Index(Bm25Settings())
    index.add(np.zeros((0, 3), np.int64), [])
    assert index.best(["a"], 3) == []
    index.add(np.array([(0, 0, 1)]), [[]])
    assert index.best(["a"], 3) == []
    assert len(index) == 1


def test_settings_have_bounds():
    for wrong in ({"k1": -1}, {"b": 1.1}):
        with pytest.raises(InputError):
            Bm25Settings.parse(wrong, "test")
