"""Tokenisers of pretrained models: text to ids and back, with the blanks and letters that others lose."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.corpus.tokeniser import tokeniser_from_json
from spalm.errors import InputError
from support.tiny_models import END

TEXTS = ["the cat", " the cat", "   three", "line\nline\n", "", "é", "🦜 🏳️‍🌈 x", "日本", "a\t b", "naïve — café"]


@pytest.fixture(scope="module")
def byte_level(tiny) -> PretrainedTokeniser:
    return PretrainedTokeniser.of_model(tiny("llama"))


@pytest.fixture(scope="module")
def byte_fallback() -> PretrainedTokeniser:
    """As sentencepiece makes them: ▁ for a blank, one before every text, <0xNN> for what has no token."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", *"thecas.", "th", "the", "▁the", "ca", "▁ca"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("▁", "ca")]
    vocabulary = {name: index for index, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PretrainedTokeniser(made, 300, 1, end_tokens=[2])


def ids_of(tokeniser: PretrainedTokeniser, text: str) -> list[int]:
    return tokeniser.encode([text.encode()])[0].tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(byte_level, byte_fallback, text):
    assert byte_level.decode(ids_of(byte_level, text)) == text
    assert byte_fallback.decode(ids_of(byte_fallback, text)) == (" " + text if text else "")


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(byte_level, text):
    assert byte_level.decode(ids_of(byte_level, text)) == text


def test_text_that_goes_on_keeps_its_blank(byte_level, byte_fallback):
    for tokeniser in (byte_level, byte_fallback):
        first, second = ids_of(tokeniser, "the"), ids_of(tokeniser, "x the")[-1:]
        assert tokeniser.decode(first).strip() == "the"
        assert tokeniser.decode([*first, *second]).endswith("the" + tokeniser.decode(second))
    assert byte_fallback.decode(ids_of(byte_fallback, "the")) == " the"


@pytest.mark.parametrize("which", ["byte_level", "byte_fallback"])
def test_a_letter_of_several_tokens(which, request):
    tokeniser = request.getfixturevalue(which)
    ids = ids_of(tokeniser, "🦜")[-4:]
    assert tokeniser.decode(ids) == "🦜"
    assert all(tokeniser.decode(ids[:count]).endswith("\ufffd") for count in (1, 2, 3))
    assert [tokeniser.spell(id) for id in ids] == ["⟨F0⟩", "⟨9F⟩", "⟨A6⟩", "⟨9C⟩"]


def test_special_tokens_are_one_token_and_stay_visible(byte_level, byte_fallback):
    assert ids_of(byte_level, f"a{END}b")[1] == 0
    assert byte_level.decode(ids_of(byte_level, f"a{END} b")) == f"a{END} b"
    assert byte_level.spell(0) == END
    assert byte_fallback.prompt("the") == [1, *ids_of(byte_fallback, "the")]
    assert byte_fallback.spell(2) == "</s>"


def test_a_prompt_is_never_nothing(byte_level, byte_fallback):
    assert byte_level.prompt("") == [byte_level.start] == [0]
    assert byte_fallback.prompt("") == [1]


def test_tokens_of_the_output_layer_that_no_text_has(byte_level):
    assert byte_level.size == 328
    assert byte_level.spell(327) == "⟨token 327⟩"
    assert byte_level.decode([327, *ids_of(byte_level, "the"), 325]) == "the"


def test_it_is_kept_as_json(byte_level, byte_fallback):
    for tokeniser in (byte_level, byte_fallback):
        again = tokeniser_from_json(json.loads(json.dumps(tokeniser.to_json())))
        for text in TEXTS:
            np.testing.assert_array_equal(ids_of(again, text), ids_of(tokeniser, text))
        assert (again.size, again.start, again.end_tokens) == (tokeniser.size, tokeniser.start, tokeniser.end_tokens)


def test_answers_end_where_the_model_or_its_chats_end(tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    assert PretrainedTokeniser.of_model(folder).end_tokens == {0}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert PretrainedTokeniser.of_model(folder).end_tokens == {0, 7}


HOSTILE = {
    "config.json": [
        *({"vocab_size": value} for value in (None, "x", {}, -1, 1 << 40, True)),
        *({"text_config": value} for value in (3, [], None, {}, {"vocab_size": []})),
        *({name: value} for name in ("eos_token_id", "bos_token_id") for value in ({}, "x", [[]], -1, 1 << 40)),
    ],
    "generation_config.json": [{"eos_token_id": {}}, {"eos_token_id": ["x"]}, []],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_description_of_another_form_is_told_so_in_a_line(tiny, tmp_path, name):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    for change in HOSTILE[name]:
        (folder / name).write_text(json.dumps({**content, **change} if change else change))
        with pytest.raises(InputError, match=rf"{name} is damaged"):
            PretrainedTokeniser.of_model(folder)
    del content["vocab_size"]
    (folder / name).write_text("{}" if name == "config.json" else "[1]")
    with pytest.raises(InputError):
        PretrainedTokeniser.of_model(folder)


def test_the_language_model_of_several_is_read_and_starts_with_a_token_that_it_has(tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    inner = {"vocab_size": 400, "bos_token_id": 400, "eos_token_id": [7, 401]}
    (folder / "config.json").write_text(json.dumps({"vocab_size": None, "text_config": inner}))
    found = PretrainedTokeniser.of_model(folder)
    assert (found.size, found.start, found.end_tokens) == (400, 7, {0, 7, 401})


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json"])
def test_a_broken_file_is_told_so(tiny, tmp_path, broken):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / broken).write_text("{")
    with pytest.raises(InputError, match=r"has no config.json and tokenizer.json that can be read"):
        PretrainedTokeniser.of_model(folder)
