"""Our tokenisers as tokenizer.json: the same ids, and the same text from them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.corpus.to_tokenizers import START, to_fast_tokenizer
from spalm.corpus.tokeniser import END_OF_DOCUMENT, BpeTokeniser, ByteTokeniser, WordTokeniser
from support.tiny_models import END

TEXT = "the cat sat on the mat . the end\nä € 😀 <eos> the\n" * 50
ALPHABET = st.sampled_from([*"the catmä€😀\n\t\x1c\x1f\x85\xa0\u2028\u3000\0<>|", "<eos>", "<unk>", " the ", "sat"])


@pytest.fixture(scope="module", params=["words", "bpe", "bytes"])
def both(request):
    match request.param:
        case "words":
            ours = WordTokeniser.learn([TEXT.encode()], None)
        case "bpe":
            ours = BpeTokeniser.learn(lambda: iter([TEXT.encode()]), 300, mark_documents=True)
        case _:
            ours = ByteTokeniser()
    made, symbol = to_fast_tokenizer(ours)
    return ours, Tokenizer.from_str(made.to_str()), symbol


@settings(deadline=None, max_examples=200)
@given(text=st.one_of(st.lists(ALPHABET).map("".join), st.text(st.characters(codec="utf-8"))))
def test_ids_and_text_are_ours(both, text):
    ours, theirs, symbol = both
    assume(symbol not in text)  # it is read as the symbol, not as text
    ids = ours.encode([text.encode()])[0].tolist()
    assert theirs.encode(text, add_special_tokens=False).ids == ids
    assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)


def test_a_symbol_stands_for_the_start(both):
    ours, theirs, symbol = both
    first = theirs.token_to_id(symbol)
    assert (symbol, first) in {(END_OF_DOCUMENT, ours.start), (START, ours.size)}
    ids = ours.encode([b"the cat"])[0].tolist()
    assert theirs.encode("the cat").ids == ids
    assert theirs.encode(f"{symbol}the cat").ids == [first, *ids]
    assert theirs.decode([first, *ids]) == "the cat"


def test_line_ends_are_text(both):
    ours, theirs, _ = both
    ids = ours.encode([b"the cat\nsat on\n"])[0].tolist()
    assert theirs.decode(ids) == "the cat\nsat on\n"


def test_a_pretrained_models_tokeniser_is_one_already(tiny):
    ours = PretrainedTokeniser.of_model(tiny("llama"))
    theirs, symbol = to_fast_tokenizer(ours)
    assert symbol == END
    assert theirs.encode("the cat").ids == ours.encode([b"the cat"])[0].tolist()
