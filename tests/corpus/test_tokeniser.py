import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spalm.corpus import TokeniserSettings
from spalm.corpus.tokeniser import BpeTokeniser, ByteTokeniser, WordTokeniser, learn_tokeniser, tokeniser_from_json
from spalm.errors import InputError

TEXT = "the cat sat on the mat . the end\nä € 😀 the\n" * 50


@pytest.fixture(scope="module")
def bpe() -> BpeTokeniser:
    return BpeTokeniser.learn(lambda: iter([TEXT.encode()]), 300, mark_documents=True)


@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_bpe_and_bytes_spell_any_text(bpe, text):
    for tokeniser in (bpe, ByteTokeniser()):
        (ids,) = tokeniser.encode([text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore").encode()])
        again = tokeniser.decode(ids.tolist())
        assert again == text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore")
        assert (ids < tokeniser.size).all()


def test_words_follow_the_wikitext_convention():
    words = WordTokeniser.learn([b" a b a \n \n c \n"], None)
    (ids,) = words.encode([b" a z \n \n"])
    assert words.decode(ids.tolist()) == "a <unk>\n\n"
    assert len(ids) == 4
    assert words.decode([words.start]) == "\n"


def test_words_keep_the_most_frequent():
    words = WordTokeniser.learn([b"a a a b b c\n"], 4)
    assert words.size == 4
    assert words.decode(words.encode([b"a b c"])[0].tolist()) == "a b <unk>"


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_ids_are_in_order_of_frequency(kind):
    tokeniser = learn_tokeniser(TokeniserSettings(kind=kind, size=300), lambda: iter([TEXT.encode()]))
    counts = np.bincount(tokeniser.encode([TEXT.encode()])[0], minlength=tokeniser.size)
    skip = 1 if kind == "bpe" else 0  # the document mark is first and does not occur in the text itself
    assert (np.diff(counts[skip:]) <= 0).all()


@pytest.mark.parametrize("kind", ["words", "bpe", "bytes"])
def test_saved_and_read_again(kind):
    size = None if kind == "bytes" else 300
    tokeniser = learn_tokeniser(TokeniserSettings(kind=kind, size=size), lambda: iter([TEXT.encode()]))
    again = tokeniser_from_json(tokeniser.to_json())
    assert (again.size, again.start, again.end_of_document) == (
        tokeniser.size,
        tokeniser.start,
        tokeniser.end_of_document,
    )
    np.testing.assert_array_equal(again.encode([TEXT.encode()])[0], tokeniser.encode([TEXT.encode()])[0])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kind": "bpe"}, "size is missing"),
        ({"kind": "bpe", "size": 100}, "more than the 257"),
        ({"kind": "bytes", "size": 100}, "bytes have 256"),
    ],
)
def test_impossible_sizes(asked, message):
    with pytest.raises(InputError, match=message):
        learn_tokeniser(TokeniserSettings.parse(asked, "test"), lambda: iter([b"text"]))
