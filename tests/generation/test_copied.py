"""Citations of what an answer copies from the passages in its prompt."""

import pytest

from spalm.compute import Hardware
from spalm.generation import Citation, CitedSource, RankedPassage, load_model
from spalm.generation.copied import copied_parts, with_copied_parts
from support.servers import copied

COMMON = {"the", "a", "in", "of", "is", "was"}


def passage(name: str, text: str, offset: int = 0) -> RankedPassage:
    return RankedPassage(name, offset, len(text.split()), text, 1.0)


def parts(answer: str, *passages: RankedPassage) -> list[tuple[str, list[str]]]:
    found = copied_parts(
        answer,
        list(passages),
        telling=lambda words: [word not in COMMON for word in words],
        count_tokens=lambda text: len(text.split()),
    )
    return [(answer[slice(*each.span)], [source.document for source in each.sources]) for each in found]


DENVER = passage("denver", "The Broncos of Denver gave up just 308 points, and won in Santa Clara.")
BOSTON = passage("boston", "The Patriots won in Boston. In 308 games the Broncos lost.")


def test_a_short_answer_comes_from_the_passage_in_which_it_stands():
    assert parts("308 points", DENVER, BOSTON) == [("308 points", ["denver"])]
    assert parts("Santa clara.", BOSTON, DENVER) == [("Santa clara", ["denver"])]
    assert parts("Chicago", DENVER, BOSTON) == []
    assert parts("", DENVER) == []


def test_what_tells_nothing_is_not_cited():
    assert parts("in the", DENVER, BOSTON) == []
    assert parts("of the a in is", passage("a", "of the a in is")) == []


def test_of_a_long_answer_parts_of_three_words_are_cited():
    answer = "I think that they gave up just 308 points in some game, which they won in Boston. In the end Denver lost."
    assert parts(answer, DENVER, BOSTON) == [
        ("gave up just 308 points", ["denver"]),
        ("won in Boston. In", ["boston"]),
    ]


def test_what_stands_in_several_passages_comes_from_the_one_with_more_of_the_answer():
    assert parts("308", DENVER, BOSTON) == [("308", ["denver", "boston"])]
    assert parts("308", BOSTON, DENVER) == [("308", ["boston", "denver"])]
    assert parts("308 games", DENVER, BOSTON) == [("308 games", ["boston"])]


def test_the_longest_run_begins_anywhere_in_the_passage():
    again = passage("again", "red green red blue red green blue")
    assert parts("red green blue", again) == [("red green blue", ["again"])]
    assert parts("green red blue red", again) == [("green red blue red", ["again"])]


def test_offsets_are_those_in_the_document():
    found = copied_parts(
        "308 points",
        [passage("denver", DENVER.text, offset=100)],
        telling=lambda words: [True] * len(words),
        count_tokens=lambda text: len(text.split()),
    )
    assert found == [Citation(0, 10, [CitedSource("denver", 107, 2.0)])]


def test_the_passage_comes_first_where_the_memory_names_another():
    def cited(start: int, end: int, *names: str) -> Citation:
        return Citation(start, end, [CitedSource(name, 0, 1.0) for name in names])

    found = with_copied_parts([cited(5, 9, "a")], [cited(0, 4, "b"), cited(8, 12, "c", "a"), cited(13, 15, "d")])
    assert [(each.span, [source.document for source in each.sources]) for each in found] == [
        ((0, 4), ["b"]),
        ((5, 9), ["a", "c"]),
        ((13, 15), ["d"]),
    ]


@pytest.mark.parametrize("memory", [True, False])
def test_an_answer_with_passages_cites_what_it_copies_from_them(attached_folder, tmp_path, memory):
    """By a model whose answers are words of its memory, and that must not name a passage for anything else."""
    model = load_model(copied(attached_folder, tmp_path / "tiny"), Hardware("cpu", 1))
    answer = model.generate("ka1 lo3 mi4 .\nka2", passages=2, max_tokens=12, memory=memory)
    telling = model.models.memories.select().tell_something
    expected = copied_parts(
        answer.text,
        answer.passages,
        telling=telling,
        count_tokens=lambda text: len(model.tokeniser.encode([text.encode()])[0]),
    )
    first = {each.span: each.document for each in answer.citations}
    assert all(first[each.span] == each.document for each in expected)
    if not memory:
        assert answer.citations == expected
