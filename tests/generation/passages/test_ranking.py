"""Passages of a memory that changes: the next question finds what was added, and none finds what was forgotten."""

import threading

import numpy as np
import pytest

from spalm.compute import Execution
from spalm.corpus import TokenStream
from spalm.corpus.tokeniser import ByteTokeniser
from spalm.errors import InputError
from spalm.generation.passages import PassageIndex, RankedPassage, fit_passages, message_with_passages, ranking
from spalm.generation.passages import text_with_passages as before
from spalm.memory import Memory, remember, source_of_text
from support.stub_memory import StubEncoder, new_memory

TOKENISER = ByteTokeniser()
ENCODER = StubEncoder(vocabulary=256)


@pytest.fixture
def memory(tmp_path) -> Memory:
    return new_memory(tmp_path / "memory", ENCODER)


def add(memory: Memory, **documents: str) -> None:
    texts = [TOKENISER.encode([text.encode()])[0] for text in documents.values()]
    ends = np.cumsum([len(text) for text in texts])
    stream = TokenStream(np.concatenate(texts).astype(np.int64), ends, lambda: [*documents], start=TOKENISER.start)
    remember(memory, None, stream, source=source_of_text(stream), execution=Execution(restart=True))


def names(index: PassageIndex, question: str, count: int = 8) -> list[str]:
    return [passage.document for passage in index.best(question, count)]


def test_what_is_added_is_found_and_what_is_forgotten_is_not(memory):
    index = PassageIndex(memory, TOKENISER)
    assert index.best("apples", 3) == []
    add(memory, fruit="Apples grow on trees.\n\nPears grow on other trees, in other gardens.", sea="Fish swim in it.")
    (found,) = index.best("Where do APPLES grow?", 1)
    assert (found.document, found.offset) == ("fruit", 0)
    assert found.text == "Apples grow on trees."
    assert found.score > 0
    pears = index.best("pears?", 2)[0]
    assert pears.text == "Pears grow on other trees, in other gardens."
    assert pears.offset == len("Apples grow on trees.\n\n")
    assert names(index, "fish") == ["sea"]
    add(memory, more="Some fish are green apples in disguise.")
    assert names(index, "apples fish") == ["more", "fruit", "sea"], "ties go by age"
    memory.forget(["more"])
    assert names(index, "apples fish") == ["fruit", "sea"]
    memory.compact()
    add(memory, more="Green fish.")
    assert names(index, "green") == ["more"]
    assert index.best("Green fish.", 1)[0].text == "Green fish."
    memory.forget(["fruit", "sea", "more"])
    assert names(index, "apples fish green") == []
    assert len(index) == 0


def test_it_agrees_with_an_index_that_is_made_anew_after_any_changes(memory, monkeypatch):
    monkeypatch.setattr(ranking, "_GROUP_TOKENS", 100)
    random, index = np.random.default_rng(1), PassageIndex(memory, TOKENISER)
    words = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu"]
    for step in range(12):
        held = memory.entries().live_documents.names
        if step % 3 == 2:
            memory.forget(random.choice(held, 2, replace=False).tolist())
        else:
            add(memory, **{f"{step}-{number}": " ".join(random.choice(words, 30)) for number in range(3)})
        if step % 5 == 4:
            memory.compact()
        question = " ".join(random.choice(words, 2))
        assert index.best(question, 8) == PassageIndex(memory, TOKENISER).best(question, 8)


def test_a_document_is_divided_once(memory, monkeypatch):
    add(memory, one="Apples and pears.", two="Fish.")
    index, divided = PassageIndex(memory, TOKENISER), []
    splitter = ranking.ParagraphSplitter(TOKENISER)
    bounds = splitter.bounds
    monkeypatch.setattr(splitter, "bounds", lambda tokens: divided.append(len(tokens)) or bounds(tokens))
    monkeypatch.setattr(ranking, "ParagraphSplitter", lambda _: splitter)
    for _ in range(3):
        index.best("apples", 1)
    assert divided == [17, 5]
    add(memory, three="Apples, too.")
    memory.forget(["one"])
    assert names(index, "apples") == ["three"]
    assert divided == [17, 5, 12]


def test_nothing_is_made_for_no_passages(memory):
    add(memory, one="Apples.")
    index = PassageIndex(memory, TOKENISER)
    assert index.best("apples", 0) == []
    assert len(index) == 0
    for wrong in (-1, 9):
        with pytest.raises(InputError, match="give 0 to 8"):
            index.best("apples", wrong)


def test_the_end_of_a_long_text_is_the_question(memory):
    add(memory, one="Apples.", two="Pears.")
    index = PassageIndex(memory, TOKENISER)
    assert names(index, "apples " * 1000 + "pears " * 256) == ["two"]


def test_threads_may_ask_while_the_memory_changes(memory):
    add(memory, **{f"n{number}": f"Apples {number}." for number in range(9)})
    index, failed, stop = PassageIndex(memory, TOKENISER), [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                found = index.best("apples", 8)
                assert len(found) >= 5
                assert all(each.text.startswith("Apples") for each in found)
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(4):
        memory.forget([f"n{number}"])
        add(memory, **{f"m{number}": f"Apples and {number}."})
        memory.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []


def passage(text: str, number: int = 0) -> RankedPassage:
    return RankedPassage(f"d{number}", 10 * number, len(text), text, 9.0 - number)


PASSAGES = [passage("first passage " * 4, 0), passage("second passage " * 4, 1), passage("third", 2)]


def test_passages_stand_before_the_text_the_best_next_to_it():
    assert before("question", []) == message_with_passages("question", []) == "question"
    assert before("question", PASSAGES[::2]) == f"third\n\n{PASSAGES[0].text}\n\nquestion"
    assert message_with_passages("question", PASSAGES[2:]) == (
        "Use what is relevant of these passages:\n\nthird\n\nquestion"
    )


@pytest.mark.parametrize("room", [None, 400, 140, 100, 90, 60, 40, 30, 9, 8, 5, 0])
def test_a_prompt_with_passages_has_room_or_has_none(room):
    """The lowest is cut first, to no less than 16 tokens; then it is left out."""

    def render(used: list[RankedPassage]) -> list[int]:
        return TOKENISER.prompt(before("question", used))

    tokens, used = fit_passages(PASSAGES, render, TOKENISER, room=room)
    assert tokens == render(used)
    assert len(tokens) <= (1000 if room is None else max(room, len(render([]))))
    assert [each.document for each in used] == [each.document for each in PASSAGES[: len(used)]]
    assert used[:-1] == PASSAGES[: len(used) - 1] or not used
    for each, whole in zip(used, PASSAGES):
        assert whole.text.startswith(each.text)
        assert each == whole or 16 <= each.tokens < whole.tokens
    if room in (None, 400):
        assert used == PASSAGES
    if room is not None and used and used[-1] != PASSAGES[len(used) - 1]:
        assert len(tokens) >= room - 2, "no more is cut than must be, but for a space at the end"
    if room == 0:
        assert used == []
