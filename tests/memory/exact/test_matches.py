"""Exact matches in sorted contexts: the same as by a naive search, and as infini-gram counts them."""

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spalm.memory.entries import MISSING
from spalm.memory.exact import LONGEST, ExactView, Excluded, reversed_context, reversed_contexts
from spalm.memory.exact.matches import LEAST_COUNTS, OCCURRENCES, SearchedContexts
from spalm.memory.exact.suffixes import sort_contexts
from support.plain_matches import assert_same_matches, plain_matches
from support.stub_memory import stream

TOKENS = 4
"""Number of different tokens: few, so that everything repeats."""
END = 65_534
"""Token that infini-gram gives for the end of a document."""


def numbered(texts: list[list[int]], gap: int = 0) -> dict[int, list[int]]:
    """Gives documents ids that follow each other, with `gap` ids between them that belong to none."""
    ends = np.cumsum([len(text) + gap for text in texts])
    return {int(end) - len(text): text for text, end in zip(texts, ends)}


def shards_of(documents: dict[int, list[int]], count: int, vocabulary: int = TOKENS) -> list[SearchedContexts]:
    """Sorts documents in `count` shards, or fewer if there are fewer documents."""
    shards = []
    for first_ids in np.array_split(np.array(list(documents)), count):
        own = [documents[id] for id in first_ids.tolist()]
        if own:
            lengths = np.array([len(text) for text in own])
            contexts = sort_contexts(np.concatenate(own).astype(np.int64), lengths, first_ids, vocabulary=vocabulary)
            shards.append(SearchedContexts(contexts))
    return shards


text = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=40)
"""A text of few different tokens."""


@settings(deadline=None, max_examples=100)
@given(st.lists(text, min_size=1, max_size=8), text, st.integers(1, 3), st.integers(0, 2), st.data())
def test_matches_are_those_of_a_naive_search(texts, context, count, gap, data):
    documents = numbered(texts, gap)
    shards = shards_of(documents, count)
    assert_same_matches(ExactView(shards).find(reversed_context(context)), 0, plain_matches(documents, context))
    own = data.draw(st.sampled_from(list(documents)), label="own document")
    first = own + data.draw(st.integers(0, len(documents[own]) - 1), label="first excluded entry, from its begin")
    last = data.draw(st.integers(first + 1, own + len(documents[own])), label="end of the excluded entries")
    for excluded in (range(own, own + len(documents[own])), range(first, last)):
        arrays = Excluded(np.array([excluded.start]), np.array([excluded.stop]))
        found = ExactView(shards).find(reversed_context(context), arrays)
        assert_same_matches(found, 0, plain_matches(documents, context, excluded))


@pytest.mark.slow
def test_many_queries_at_once_are_those_one_by_one():
    random = np.random.default_rng(2)
    documents = numbered([random.integers(0, 3, size).tolist() for size in (501, 2, 307, 1, 89)])
    first_ids, lengths = np.array(list(documents)), np.array([len(text) for text in documents.values()])
    shards = shards_of(documents, 3)
    queries = stream({str(id): text for id, text in documents.items()})
    positions = np.arange(0, len(queries), 3)
    own = queries.documents_of(positions)
    excluded = Excluded(first_ids[own], first_ids[own] + lengths[own])
    every = ExactView(shards).find(reversed_contexts(queries, positions), excluded)
    assert (every.counts > OCCURRENCES).any()
    for row, position in enumerate(positions.tolist()):
        begin = int(first_ids[own[row]])
        context = queries.tokens[begin:position].tolist()
        expected = plain_matches(documents, context, range(begin, begin + int(lengths[own[row]])))
        assert_same_matches(every, row, expected)


def test_no_match_reaches_across_a_documents_border():
    documents = numbered([[0, 1, 2], [3, 0, 1]])
    for count in (1, 2):
        found = ExactView(shards_of(documents, count)).find(reversed_context([1, 2, 3]))
        assert (found.lengths[0, 0], found.counts[0, 0]) == (1, 1)
        assert found.ids[0, 0, 0] == 4


def test_the_end_of_a_document_is_no_occurrence_with_a_follower():
    documents = numbered([[0, 1, 2], [1, 3]])
    found = ExactView(shards_of(documents, 1)).find(reversed_context([0, 1, 2]))
    assert found.lengths[0, 0] == 0, "2 stands only where a document ends"
    found = ExactView(shards_of(documents, 1)).find(reversed_context([3, 1]))
    assert (found.lengths[0, 0], found.counts[0, 0]) == (1, 2)
    assert set(found.tokens[0, 0].tolist()) == {2, 3, MISSING}


def test_no_more_than_the_longest_context_is_compared():
    same = [0, 1, 2] * LONGEST
    found = ExactView(shards_of(numbered([[*same, 3]]), 1)).find(reversed_context(same))
    assert found.lengths[0, 0] == LONGEST


def test_unknown_tokens_and_an_empty_context_match_nothing():
    shards = shards_of(numbered([[0, 1, 2, 3]]), 1)
    for context in ([], [TOKENS], [1, TOKENS + 70_000]):
        assert not ExactView(shards).find(reversed_context(context)).lengths.any()
    assert ExactView(shards).find(reversed_context([TOKENS, 1])).lengths[0, 0] == 1
    assert not ExactView([]).find(reversed_context([1])).lengths.any()


@pytest.mark.parametrize("vocabulary", [65_534, 65_535, 65_536, 200_000])
def test_any_vocabulary_fits(vocabulary):
    random = np.random.default_rng(vocabulary)
    tokens = np.array([0, 1, vocabulary - 2, vocabulary - 1])
    texts = [tokens[random.integers(0, 4, 50)].tolist() for _ in range(3)]
    documents = numbered(texts)
    shards = shards_of(documents, 2, vocabulary)
    for end in range(1, 50):
        context = texts[0][:end]
        assert_same_matches(ExactView(shards).find(reversed_context(context)), 0, plain_matches(documents, context))


def test_occurrences_are_taken_from_all_shards_and_from_begin_to_end():
    """Only what came before tells occurrences of `1 2` apart: 0, 3, or 4, each in a third of the documents."""
    followers = {0: 5, 3: 6, 4: 7}
    documents = numbered([[before, 1, 2, after] for before, after in followers.items() for _ in range(100)])
    found = ExactView(shards_of(documents, 3, 8)).find(reversed_context([1, 2]))
    assert found.counts.tolist() == [[300, 300, 300]]
    shares = Counter(found.tokens[0, 0].tolist())
    assert all(shares[token] > OCCURRENCES // 4 for token in followers.values()), shares


def test_an_excluded_document_takes_nothing_from_the_spread_of_the_others():
    others = [[before, 1, 2, after] for before, after in {0: 5, 3: 6, 4: 7}.items() for _ in range(100)]
    documents = numbered([*others, [0, 1, 2] * 500])
    own = max(documents)
    excluded = Excluded(np.array([own]), np.array([own + 1500]))
    found = ExactView(shards_of(documents, 1, 8)).find(reversed_context([1, 2]), excluded)
    assert found.counts.tolist() == [[300, 300, 300]]
    assert min(Counter(found.tokens[0, 0].tolist())[token] for token in (6, 7)) >= 2


def infini_gram_engine(folder, texts: list[list[int]]):
    """Returns infini-gram's engine for some texts, whose index its own indexer has made."""
    engine = pytest.importorskip("infini_gram.engine")
    separator = np.array([65_535], "<u2")
    folder.mkdir()
    with (folder / "tokenized.0").open("wb") as tokens, (folder / "offset.0").open("wb") as offsets:
        for text in texts:
            offsets.write(np.array([tokens.tell()], "<u8").tobytes())
            tokens.write(separator.tobytes() + np.array(text, "<u2").tobytes())
    options = {"data_dir": folder, "save_dir": folder, "token_dtype": "u16", "cpus": 1, "mem": 1, "ulimit": 1024}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "infini_gram.indexing", *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return engine.InfiniGramEngine(str(folder), eos_token_id=END, token_dtype="u16")


@pytest.mark.parametrize("vocabulary", [3, 700])
def test_counts_are_those_of_infini_gram(tmp_path, vocabulary):
    random = np.random.default_rng(vocabulary)
    words = [random.integers(0, vocabulary, random.integers(2, 6)).tolist() for _ in range(60)]

    def text_of(numbers: np.ndarray) -> list[int]:
        return [token for number in numbers for token in words[number]]

    texts = [text_of(random.integers(0, 60, 150) ** 2 // 60) for _ in range(11)]
    engine = infini_gram_engine(tmp_path / "infini-gram", texts)
    shards = shards_of(numbered(texts), 2, vocabulary)

    def count(context: list[int]) -> int:
        return engine.count(context)["count"]

    def followers(context: list[int]) -> dict[int, int]:
        counted = engine.ntd(context, max_support=1000)["result_by_token_id"]
        return {token: told["cont_cnt"] for token, told in counted.items() if token != END}

    seen = Counter()
    for _ in range(100):
        context = text_of(random.integers(0, 60, 3))[: int(random.integers(1, 12))]
        found = ExactView(shards).find(reversed_context(context))
        for level, least in enumerate(LEAST_COUNTS):
            length, places = int(found.lengths[0, level]), int(found.counts[0, level])
            assert places == (count(context[-length:]) if length else 0)
            if length < len(context) and count(context[-length - 1 :]) >= least:
                assert not followers(context[-length - 1 :]), "a longer match that something follows was passed over"
            if length and places <= OCCURRENCES:
                taken = Counter(found.tokens[0, level].tolist())
                del taken[MISSING]
                assert taken == followers(context[-length:])
                seen["all followers"] += 1
            seen[length] += 1
    assert seen["all followers"] > 20
    assert len(seen) > 5
