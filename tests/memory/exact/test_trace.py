"""Tracing against a naive search: every span of a text that stands in a document, and where."""

import numpy as np
import pytest

from spalm.memory import remember, source_of_text
from spalm.memory.exact import LONGEST, VerbatimSpan
from support.stub_memory import StubEncoder, new_memory, stream


@pytest.fixture
def encoder() -> StubEncoder:
    return StubEncoder()


@pytest.fixture
def memory(tmp_path, encoder):
    return new_memory(tmp_path / "memory", encoder)


def add(memory, encoder, texts: dict[str, list[int]], *, sort: bool = False) -> None:
    text = stream(texts)
    remember(memory, encoder, text, source=source_of_text(text))
    if sort:
        memory.exact.catch_up()


def places(memory, span: VerbatimSpan) -> list[tuple[str, int]]:
    sources = [memory.entries().source(int(id)) for id in span.ids]
    return [(source.document, source.offset) for source in sources]


def naive_places(texts: dict[str, list[int]], wanted: list[int]) -> list[tuple[str, int]]:
    return [
        (name, offset)
        for name, text in texts.items()
        for offset in range(len(text) - len(wanted) + 1)
        if text[offset : offset + len(wanted)] == wanted
    ]


def naive_spans(texts: dict[str, list[int]], tokens: list[int], least: int) -> dict[tuple[int, int], list]:
    """The spans that stand in a document and cannot be made longer, with all their places."""
    found = {}
    for start in range(len(tokens)):
        for end in range(start + least, len(tokens) + 1):
            there = naive_places(texts, tokens[start:end])
            if there:
                found[start, end] = there
    longer = lambda one, other: one != other and other[0] <= one[0] and one[1] <= other[1]  # noqa: E731
    return {span: there for span, there in found.items() if not any(longer(span, other) for other in found)}


def compare(memory, texts, tokens: list[int], least: int, left_out: list[str] | None = None) -> None:
    searched = {name: text for name, text in texts.items() if name not in (left_out or [])}
    live = memory.entries().live_documents
    first_ids = np.array([live.first_ids[live.names.index(name)] for name in left_out or []], np.int64)
    found = memory.exact.current().trace(np.array(tokens, np.int64), least, first_ids)
    expected = naive_spans(searched, tokens, least)
    assert {(span.start, span.end) for span in found} == expected.keys()
    assert [len(span) for span in found] == sorted((len(span) for span in found), reverse=True)
    for span in found:
        there = expected[span.start, span.end]
        named = places(memory, span)
        assert span.count == len(there)
        assert len(set(named)) == len(named) == min(5, len(there))
        assert set(named) <= set(there)


@pytest.mark.parametrize("seed", range(6))
def test_spans_are_those_of_a_naive_search(memory, encoder, seed):
    """Texts of few words, so that much is repeated; some documents in shards, some in none, one of one token."""
    random = np.random.default_rng(seed)

    def text(length: int) -> list[int]:
        return random.choice(50 if length < 5 else 3, length).tolist()

    texts: dict[str, list[int]] = {}
    for batch, sort in enumerate((True, True, False)):
        new = {f"{batch}-{number}": text(int(length)) for number, length in enumerate(random.integers(1, 40, 7))}
        add(memory, encoder, new, sort=sort)
        texts |= new
    copied = [token for name in ("0-1", "2-3") for token in texts[name]]
    for tokens in (text(30), copied, [49, *texts["1-2"], 49], [7]):
        for least in (1, 4):
            compare(memory, texts, tokens, least)
    compare(memory, texts, copied, 2, left_out=["0-1"])
    compare(memory, texts, copied, 1, left_out=["0-1", "2-3", "1-0"])
    memory.forget(["0-1", "1-2"])
    left = {name: tokens for name, tokens in texts.items() if name not in ("0-1", "1-2")}
    compare(memory, left, copied, 2)


def test_a_quotation_is_traced_to_its_document_and_lost_with_it(memory, encoder):
    quotation = [31, 7, 42, 9, 18, 27, 36]
    add(memory, encoder, {"other": [1, 2, 3] * 9, "source": [4, 5, *quotation], "third": [6] * 8}, sort=True)
    traced = np.array([0, 1, 0, *quotation, 8, 8])
    (span,) = memory.exact.current().trace(traced)
    assert (span.start, span.end, span.count) == (3, 10, 1)
    assert places(memory, span) == [("source", 2)]  # it ends with the document's last token
    memory.forget(["source"])
    assert memory.exact.current().trace(traced) == []
    memory.compact()
    assert memory.exact.current().trace(traced) == []


def test_spans_end_at_the_borders_of_documents(memory, encoder):
    add(memory, encoder, {"one": [*range(10, 18)], "two": [*range(18, 26)]})
    found = memory.exact.current().trace(np.arange(10, 26))
    assert [(span.start, span.end, *places(memory, span)) for span in found] == [
        (0, 8, ("one", 0)),
        (8, 16, ("two", 0)),
    ]


def test_long_spans_are_found_whole(memory, encoder):
    random = np.random.default_rng(0)
    long = random.integers(0, 40, 20 * LONGEST)
    add(memory, encoder, {"short": [1] * 9, "long": long.tolist()}, sort=True)
    whole, part = memory.exact.current().trace(np.concatenate([[45], long, [45], long[100:1000], [46]]))
    assert (whole.start, whole.end, places(memory, whole)) == (1, 1 + len(long), [("long", 0)])
    assert (part.start, len(part), places(memory, part)) == (2 + len(long), 900, [("long", 100)])


def test_nothing_is_found_where_there_is_nothing(memory, encoder):
    assert memory.exact.current().trace(np.arange(9)) == []
    add(memory, encoder, {"one": [1, 2, 3]})
    assert memory.exact.current().trace(np.zeros(0, np.int64), 1) == []
    assert memory.exact.current().trace(np.array([49, 48]), 1) == []
