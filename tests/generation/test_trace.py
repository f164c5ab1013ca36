"""Tracing of texts: offsets in characters, documents, and the verb, for models that were attached and for runs."""

import json
import shutil

import pytest

import spalm as api
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.corpus.tokeniser import TokeniserSettings, learn_tokeniser
from spalm.generation import TracedSpan, open_traceable
from support.commands import refused, spalm

CPU = api.Execution(api.Hardware("cpu", 1))
HARD = "Zoë  paid 5 €\tfor\u00a0tea\r\n and 𝄞 , then\n\n left .\n"


@pytest.fixture
def folder(attached_folder, tmp_path):
    return shutil.copytree(attached_folder, tmp_path / "tiny")


def same_words(one: str, other: str) -> bool:
    return one.split() == other.split()


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe", pytest.param("pretrained", marks=pytest.mark.slow)])
def test_offsets_are_those_of_the_tokens(kind, tiny):
    if kind == "pretrained":
        tokeniser = PretrainedTokeniser.of_model(tiny("llama"))
    else:
        settings = TokeniserSettings(kind=kind, size=300 if kind == "bpe" else None)
        tokeniser = learn_tokeniser(settings, lambda: iter([HARD.encode()]))
    for text in (HARD, "", "a", "\n", "  x  "):
        ids, offsets = tokeniser.encode_with_offsets(text)
        assert ids.tolist() == tokeniser.encode([text.encode()])[0].tolist()
        assert offsets.shape == (len(ids), 2)
        assert (offsets[:, 0] <= offsets[:, 1]).all()
        assert (offsets[1:] >= offsets[:-1]).all()
    ids, offsets = tokeniser.encode_with_offsets(HARD)
    for first in range(len(ids)):
        if first == 0 or offsets[first, 0] >= offsets[first - 1, 1]:  # not within a character of several tokens
            rest = tokeniser.decode(ids[first:].tolist())
            assert same_words(rest, HARD[offsets[first, 0] :]), (first, rest)


def test_a_span_is_a_part_of_the_text_and_stands_where_it_says(finished):
    model = api.load(finished.directory, "spalm", execution=CPU)
    train = finished.corpus.split("train")
    begin = int(train.begins[3])
    quotation = model.tokeniser.decode(train.tokens[begin + 5 : begin + 25].tolist()).strip()
    text = f"never   before {quotation} never after"
    span = model.trace(text)[0]
    assert isinstance(span, api.TracedSpan)
    assert text[span.start : span.end] == span.text
    assert quotation in span.text
    assert span.tokens >= 19
    assert (train.names[3], 5) in [(source.document, source.offset) for source in span.sources]
    for each in model.trace(text, least=2):
        for source in each.sources:
            starts = [int(train.begins[number]) for number, name in enumerate(train.names) if name == source.document]
            there = [train.tokens[start + source.offset :][: each.tokens].tolist() for start in starts]
            assert any(same_words(model.tokeniser.decode(tokens), each.text) for tokens in there)
    assert model.trace(text, least=2)[0].tokens == span.tokens
    with pytest.raises(api.InputError, match="least = 0"):
        model.trace(text, least=0)
    with pytest.raises(api.InputError, match="no Unicode"):
        model.trace("\ud800")


def test_a_planted_quotation_is_traced_and_lost_with_its_document(folder):
    model = api.load(folder, execution=CPU)
    planted = "Tomas Verrin joined Orvane Rovers from Lake Dunmore United."
    text = f"It is said: {planted} Is it?"
    before = model.trace(text)
    model.memory.add("notes.md", f"First. It is said: {planted}")
    span = model.trace(text)[0]
    assert planted in text[span.start : span.end] == span.text
    (source,) = span.sources
    assert (source.document, span.count) == ("notes.md", 1)
    tokens = model.tokeniser.encode([f"First. It is said: {planted}".encode()])[0].tolist()
    assert model.tokeniser.decode(tokens[source.offset : source.offset + span.tokens]).strip() == span.text.strip()
    model.memory.forget("notes.md")
    assert model.trace(text) == before


def test_a_memory_is_traced_without_its_networks(finished, folder, tmp_path):
    train = finished.corpus.split("train")
    text = finished.corpus.tokeniser.decode(train.tokens[:12].tolist())
    spans = [open_traceable(where).trace(text) for where in (finished.directory, finished.directory / "memory")]
    assert spans[0] == spans[1]
    assert isinstance(spans[0][0], TracedSpan)
    alone = shutil.copytree(folder / "memory", tmp_path / "alone")
    with pytest.raises(api.InputError, match="the tokeniser of this memory is not known"):
        open_traceable(alone)
    shutil.copytree(finished.directory / "corpus", tmp_path / "corpus")
    with pytest.raises(api.InputError, match="tokens in its vocabulary"):
        open_traceable(alone)
    with pytest.raises(api.InputError, match="holds no memory"):
        open_traceable(tmp_path / "nothing")


@pytest.mark.slow
def test_the_verb_prints_a_table_or_json(finished, tmp_path):
    train = finished.corpus.split("train")
    quotation = finished.corpus.tokeniser.decode(train.tokens[20:40].tolist())
    file = tmp_path / "own.txt"
    file.write_text(f"never {quotation} never")
    found = spalm("trace", finished.directory, "--file", file, "--json")
    assert found.returncode == 0, found.stderr
    first = json.loads(found.stdout)[0]
    assert file.read_text()[first["start"] : first["end"]] == first["text"]
    assert first["tokens"] >= 20
    assert {"document": train.names[0], "offset": 20} in first["sources"]
    shown = spalm("trace", finished.directory, file.read_text(), "--least", "9").stdout
    assert str(first["tokens"]) in shown
    assert "stand word for word in the memory" in shown
    assert "no span" in spalm("trace", finished.directory, "never again").stdout
    assert "either a text or --file" in refused("trace", finished.directory)
    assert "either a text or --file" in refused("trace", finished.directory, "a", "--file", file)
    file.write_bytes(b"\xff")
    assert "not UTF-8" in refused("trace", finished.directory, "--file", file)
