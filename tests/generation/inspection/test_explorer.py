"""The explorer says what the records say, and what it would say without parts of the memory."""

import numpy as np
import pytest

from spalm.attachment import Attached
from spalm.compute import Hardware
from spalm.corpus import token_in_text, visible_token
from spalm.corpus import tokeniser as tokenisers
from spalm.errors import InputError
from spalm.generation import AttachedModels
from spalm.generation.inspection import CorpusPassage, Explorer, Switches
from spalm.runs import ROWS

MEMORY = ("knn-lm", "spalm", "spalm+knn", "spalm-adaptive", "spalm-extended")


@pytest.fixture(scope="module")
def place() -> CorpusPassage:
    return CorpusPassage("test", 1, 37, 101)


@pytest.fixture(scope="module")
def rows(finished) -> np.ndarray:
    first = int(finished.corpus.split("test").ends[0]) + 37
    return np.arange(first, first + 101)


def test_it_says_what_the_records_say(explorer, finished, place, rows):
    found = explorer.passage(place)
    tokeniser, text = finished.corpus.tokeniser, finished.corpus.split("test")
    assert found["tokens"] == [token_in_text(tokeniser, token) for token in text.tokens[rows].tolist()]
    assert {"↵\n"} == {token for token in found["tokens"] if "\n" in token}
    for model in ROWS:
        kept = finished.records(model).log_probabilities("test")[rows]
        # The mixture learned from hidden states in half precision, and is given them whole here.
        close = 2e-3 if ROWS[model].mixture == "adaptive" else 1e-4
        np.testing.assert_allclose(found["models"][model]["log_probabilities"], kept, atol=close, rtol=close)
    gates = finished.records("spalm").of("test", "gate")[rows].mean(1, dtype=np.float32)
    np.testing.assert_allclose(found["models"]["spalm"]["network"], gates, atol=1e-3)
    alone = finished.records("spalm").of("test", "without_memory")[rows]
    np.testing.assert_allclose(found["models"]["spalm"]["without_memory"], alone, atol=1e-4)
    knn = finished.records("knn-lm").facts["knn"]
    assert found["models"]["knn-lm"]["network"] == pytest.approx([1 - knn["weight"]] * len(rows))


def test_a_token_is_shown_with_its_neighbours(explorer, finished, place, rows):
    passage, found = explorer.passage(place), explorer.token(place, 20)
    records, entries = finished.records("spalm"), finished.memory.entries()
    for model, scores in passage["models"].items():
        assert found["probability"][model] == pytest.approx(np.exp(scores["log_probabilities"][20]), rel=1e-3)
        likely = [each["probability"] for each in found["likely"][model]]
        assert likely == sorted(likely, reverse=True)
        assert found["network"][model] == pytest.approx(scores.get("network", [1] * 101)[20], abs=1e-4)
    shown = found["neighbours"]
    assert [each["id"] for each in shown] == finished.neighbours.read("test", rows[20:21])[0][0].tolist()
    attention = records.of("test", "attention")[rows[20]]
    assert [each["weights"]["spalm"] for each in shown[:4]] == pytest.approx(attention.tolist(), abs=1e-3)
    assert all(each["weights"]["spalm"] == 0 for each in shown[4:])
    for model in MEMORY:
        assert sum(each["weights"][model] for each in shown) == pytest.approx(1, abs=1e-4)
    for each in shown:
        source = entries.source(each["id"])
        assert (each["document"], each["offset"]) == (source.document, source.offset)
        train, decode = finished.corpus.split("train"), finished.corpus.tokeniser.decode
        begin = each["id"] - each["offset"]  # ids are positions of train: nothing else was remembered
        assert begin in train.begins.tolist()
        assert each["shown"] == visible_token(finished.corpus.tokeniser, int(train.tokens[each["id"]]))
        assert each["before"] == decode(train.tokens[max(begin, each["id"] - 24) : each["id"]].tolist())
        assert each["came"] == (each["shown"] == found["shown"])


def test_a_token_is_shown_with_its_exact_matches(explorer, finished, place, rows):
    text, train = finished.corpus.split("test"), finished.corpus.split("train")
    held = [train.tokens[begin:end].tolist() for begin, end in zip(train.begins, train.ends)]
    for position in (0, 20, 57):
        found = explorer.token(place, position)["matches"]
        assert found
        for each in found:
            context = text.tokens[rows[position] - each["length"] : rows[position]].tolist()
            assert each["text"] == finished.corpus.tokeniser.decode(context)
            size = len(context)
            places = sum(
                tokens[start : start + size] == context for tokens in held for start in range(len(tokens) - size + 1)
            )
            assert each["count"] == places
            for at in each["places"]:
                assert train.tokens[at["id"] - size : at["id"]].tolist() == context
                assert 0 <= at["weights"]["exact"] <= 1
        assert found[0]["places"][0]["weights"]["exact"] > 0
        off = Switches(documents=frozenset(at["document_number"] for at in found[0]["places"]))
        without = explorer.token(place, position, off)["matches"]
        assert not {at["document_number"] for each in without for at in each["places"]} & off.documents


def test_without_every_document_it_is_the_network_alone(explorer, finished, place):
    off = Switches(documents=frozenset(finished.memory.entries().live_documents.numbers.tolist()))
    found, plain = explorer.passage(place, off)["models"], explorer.passage(place)["models"]
    assert found["knn-lm"]["log_probabilities"] == pytest.approx(plain["transformer-xl"]["log_probabilities"], abs=1e-4)
    for model in ("spalm", "spalm+knn", "spalm-adaptive", "spalm-extended"):
        assert found[model]["log_probabilities"] == pytest.approx(plain[model]["without_memory"], abs=1e-4)
        assert set(found[model]["network"]) == {1.0}
    token = explorer.token(place, 20, off)
    assert [each["on"] for each in token["neighbours"]] == [False] * 16
    assert explorer.passage(place)["models"] == plain  # nothing stays switched off


def test_what_is_switched_off_makes_room_for_the_next(explorer, place):
    before = explorer.token(place, 20)["neighbours"]
    after = explorer.token(place, 20, Switches(frozenset({before[0]["id"]})))["neighbours"]
    assert [each["on"] for each in after] == [False] + [True] * 15
    assert after[0]["weights"]["spalm"] == 0
    assert before[4]["weights"]["spalm"] == 0 < after[4]["weights"]["spalm"]
    gone = before[0]["document_number"]
    by_document = explorer.token(place, 20, Switches(documents=frozenset({gone})))["neighbours"]
    assert all(each["on"] == (each["document_number"] != gone) for each in by_document)


def test_a_text_of_ones_own_finds_its_true_neighbours(explorer, finished):
    train = finished.corpus.split("train")
    text = finished.corpus.tokeniser.decode(train.tokens[: int(train.ends[0])].tolist())
    found = explorer.passage(text)
    assert found["shown"][:3] == [visible_token(finished.corpus.tokeniser, int(token)) for token in train.tokens[:3]]
    # The beginning of the training text, read from its beginning: it is in the memory, and finds itself.
    first = [explorer.token(text, position)["neighbours"][0] for position in (0, 9, 100)]
    assert [each["offset"] for each in first] == [0, 9, 100]
    assert max(each["distance"] for each in first) < 1e-3
    entries = finished.memory.entries()
    keys = entries.keys(0, len(entries)).astype(np.float32)
    true = np.sort(((keys - keys[100]) ** 2).sum(1))[:16]
    shown = [each["distance"] for each in explorer.token(text, 100)["neighbours"]]
    np.testing.assert_allclose(shown, true, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("passage", "problem"),
    [
        ("", "the text has 0 tokens; give 1 to 2,000"),
        ("ka1 " * 2001, "the text has 2,001 tokens"),
        ("ka1 \ud800", "the text is no Unicode"),
        (CorpusPassage("test", 3), "document 3: test has 3 documents"),
        (CorpusPassage("test", 0, 10**9), "offset 1000000000"),
        (CorpusPassage("test", 0, 0, 2001), "length 2001"),
    ],
)
def test_what_cannot_be_read_is_refused(explorer, passage, problem):
    with pytest.raises(InputError, match=problem):
        explorer.passage(passage)


def test_what_learned_from_a_part_of_dev_does_not_speak_there(explorer, finished):
    """Each half of dev is scored by a mixture that learned from the other, here as in the records."""
    dev, records = finished.corpus.split("dev"), finished.records("spalm-adaptive")
    for document in range(3):
        rows = np.arange(dev.begins[document], dev.begins[document] + 200)
        found = explorer.passage(CorpusPassage("dev", document, 0, 200))["models"]["spalm-adaptive"][
            "log_probabilities"
        ]
        np.testing.assert_allclose(found, records.log_probabilities("dev")[rows], atol=5e-3, rtol=5e-3)


def test_namesakes_are_told_apart(explorer):
    names = [each["name"] for each in explorer.documents("test", "")]
    assert names[1] == names[2] != names[0]
    found = [explorer.passage(CorpusPassage("test", number, 0, 30))["tokens"] for number in (1, 2)]
    assert found[0] != found[1]
    assert [each["number"] for each in explorer.documents("test", "TEST-1")] == [1, 2]


def test_bytes_that_are_no_text_are_told_apart():
    bytes_ = tokenisers.ByteTokeniser()
    shown = [visible_token(bytes_, byte) for byte in (0xC3, 0xA9, 0x41, 0x0A, 0x20, 0x07)]
    assert shown == ["⟨C3⟩", "⟨A9⟩", "A", "↵", "·", "␇"]
    pieces = lambda: iter(["né né né nà \u202e x".encode()])  # noqa: E731
    bpe = tokenisers.BpeTokeniser.learn(pieces, 262, mark_documents=True)
    ids = bpe.encode(["é \u202e".encode()])[0].tolist()
    assert "".join(visible_token(bpe, id) for id in ids) == "⟨C3⟩⟨A9⟩·⟨E280⟩⟨AE⟩"
    assert visible_token(bpe, bpe.start) == "<|document|>"
    for id in range(bpe.size):
        text = bpe.decode([id])
        assert bpe.spell(id) == text or "\ufffd" in text


def test_what_stands_word_for_word_in_the_memory_is_traced(explorer, finished):
    train = finished.corpus.split("train")
    begin, names = int(train.begins[2]), finished.memory.entries().live_documents
    text = finished.corpus.tokeniser.decode(train.tokens[begin + 8 : begin + 40].tolist())
    found = explorer.trace(text)
    whole = found["spans"][0]
    assert (whole["start"], whole["end"], whole["count"]) == (0, 32, 1)
    assert whole["sources"] == [{"document": train.names[2], "offset": 8}]
    number = int(names.numbers[names.names.index(train.names[2])])
    without = explorer.trace(text, Switches(documents=frozenset([number])))["spans"]
    assert all(span["end"] - span["start"] >= found["least"] for span in without)
    assert train.names[2] not in {source["document"] for span in without for source in span["sources"]}


def test_a_passage_is_not_traced_to_its_own_document(attached_folder):
    attached = Explorer(AttachedModels(Attached(attached_folder, Hardware("cpu", 1))))
    name = attached.models.corpus.split("test").names[0]
    spans = attached.trace(CorpusPassage("test", 0, 0, 60))["spans"]
    assert spans
    assert name not in {source["document"] for span in spans for source in span["sources"]}
    text = attached.models.tokeniser.decode(attached.models.corpus.split("test").tokens[:60].tolist())
    assert name in {source["document"] for span in attached.trace(text)["spans"] for source in span["sources"]}
