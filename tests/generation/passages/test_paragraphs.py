"""Paragraphs of tokens, compared with the same text divided as text."""

import re

import numpy as np
import pytest

from spalm.corpus.tokeniser import BpeTokeniser, ByteTokeniser, Tokeniser, WordTokeniser
from spalm.generation.passages import ParagraphSplitter
from support.small_texts import sentences

TEXT = (
    "A heading\n\n"
    "The first paragraph has a line end\nand goes on, so it is one; it has words enough for that.\n\n"
    "   \n"
    "The second one stands after a blank line of spaces, and it is long enough to stand alone.\n"
    " \n\n\n"
    "The third ends the text without a line end, and is as long as any other that stands here"
)


def tokenisers() -> dict[str, Tokeniser]:
    text = f"{TEXT} {sentences(300, 0)}".encode()
    return {
        "bytes": ByteTokeniser(),
        "words": WordTokeniser.learn([text], None),
        "bpe": BpeTokeniser.learn(lambda: iter([text]), 400, mark_documents=True),
    }


@pytest.fixture(scope="module", params=["bytes", "words", "bpe"])
def tokeniser(request) -> Tokeniser:
    return tokenisers()[request.param]


def paragraphs(tokeniser: Tokeniser, text: str) -> tuple[np.ndarray, list[str]]:
    """The bounds and the texts of the paragraphs of a document, as it is in a corpus."""
    tokens = tokeniser.encode([text.encode()])[0]
    if tokeniser.end_of_document is not None:
        tokens = np.append(tokens, tokeniser.end_of_document)
    bounds = ParagraphSplitter(tokeniser).bounds(tokens)
    inside = [
        [each for each in tokens[start:end] if each not in tokeniser.end_tokens] for start, end in bounds.tolist()
    ]
    return bounds, [tokeniser.decode(each).strip() for each in inside]


def same(one: str, other: str) -> bool:
    """Whether two texts differ in white space only, which words do not keep."""
    return one.split() == other.split()


def test_blank_lines_divide_and_headings_belong_to_what_follows(tokeniser):
    bounds, found = paragraphs(tokeniser, TEXT)
    heading, first, second, third = re.split(r"\n\s*\n", TEXT)
    assert len(found) == 3
    assert same(found[0], f"{heading}\n\n{first}")
    assert same(found[1], second)
    assert same(found[2], third)
    assert bounds[0, 0] == 0
    assert (bounds[1:, 0] == bounds[:-1, 1]).all()


def test_long_parts_are_cut_into_pieces_of_about_the_same_length(tokeniser):
    text = " ".join(sentences(2000, 1).split())
    bounds, found = paragraphs(tokeniser, text)
    lengths = np.diff(bounds, axis=1)[:, 0]
    assert len(found) > 3
    assert lengths.min() >= 60
    assert lengths.max() <= 194
    assert same(" ".join(found), text) or isinstance(tokeniser, ByteTokeniser)


def test_pieces_begin_with_words_and_after_sentences():
    tokeniser = tokenisers()["bpe"]
    sentence = "the cat sat on a mat near my fire and saw that the red dog ran far away from it"
    _, found = paragraphs(tokeniser, " ".join(f"{sentence} {number}." for number in range(60)))
    assert len(found) > 3
    assert all(each.startswith("the cat") and each.endswith(".") for each in found)
    _, found = paragraphs(tokeniser, " ".join([sentence] * 60))
    words = {*sentence.split()}
    assert {word for each in found for word in each.split()} <= words


@pytest.mark.parametrize("text", ["", "\n\n \n", " "])
def test_a_document_without_a_visible_sign_has_no_paragraph(tokeniser, text):
    bounds, found = paragraphs(tokeniser, text)
    assert bounds.shape == (0, 2)
    assert found == []


def test_white_space_at_the_beginning_is_left_out(tokeniser):
    _, found = paragraphs(tokeniser, "\n\n\nWords")
    assert found == ["Words"] or isinstance(tokeniser, WordTokeniser)
