"""Answers of a model with passages of its memory in the prompt."""

import pytest

from spalm.compute import Hardware
from spalm.errors import InputError
from spalm.generation import Model, load_model
from support.commands import refused, spalm
from support.servers import copied

PROMPT = "ka1 lo3 mi4 .\nka2"
NOTE = "zz9 qq8 zz7 qq6 zz9 qq8 zz7 qq6 zz9 qq8 .\n"


@pytest.fixture
def folder(attached_folder, tmp_path):
    return copied(attached_folder, tmp_path / "tiny")


@pytest.fixture
def model(folder) -> Model:
    return load_model(folder, Hardware("cpu", 1))


def test_an_answer_with_passages_is_that_to_the_prompt_with_them_before_it(model):
    (best,) = model.passages(PROMPT, count=1)
    assert {*PROMPT.split()} & {*best.text.split()}
    answer = model.generate(PROMPT, passages=1, max_tokens=7)
    assert [passage.document for passage in answer.passages] == [best.document]
    expected = model.generate(f"{answer.passages[0].text}\n\n{PROMPT}", max_tokens=7)
    assert answer.text == expected.text
    assert [each.span for each in answer.citations] == [each.span for each in expected.citations]


def test_without_passages_nothing_changes(model):
    assert model.generate(PROMPT, passages=0, max_tokens=7) == model.generate(PROMPT, max_tokens=7)
    assert model.generate(PROMPT, max_tokens=2).passages == []
    assert len(model.models.passages) == 0, "nothing is divided into paragraphs"


def test_a_document_is_a_passage_from_its_addition_until_it_is_forgotten(model):
    assert model.passages("zz9 qq8") == []
    model.memory.add("note.md", NOTE)
    (found,) = model.passages("What is zz9 and qq8?")
    assert (found.document, found.offset, found.text) == ("note.md", 0, NOTE.strip())
    answer = model.generate("zz9 qq8", passages=2, max_tokens=3)
    assert [passage.document for passage in answer.passages] == ["note.md"]
    model.memory.forget("note.md")
    assert model.passages("zz9 qq8") == []
    assert model.generate("zz9 qq8", passages=2, max_tokens=3).passages == []


@pytest.mark.parametrize("length", [20, 60, 90, 105])
def test_prompt_passages_and_answer_fit_the_context(model, length):
    """The model reads 128 tokens; a prompt with eight passages would have more."""
    answer = model.generate(PROMPT, passages=8, max_tokens=length)
    room = 128 - length - len(model.tokeniser.prompt(PROMPT))
    assert sum(passage.tokens for passage in answer.passages) <= room
    assert bool(answer.passages) == (room > 20)
    assert [each.score for each in answer.passages] == sorted((each.score for each in answer.passages), reverse=True)


def test_chunks_name_the_passages_at_the_end(model):
    *chunks, last = model.stream(PROMPT, passages=1, max_tokens=3)
    assert all(chunk.passages is None for chunk in chunks)
    assert len(last.passages) == 1
    for wrong in (-1, 9):
        with pytest.raises(InputError, match=f"passages = {wrong}: give 0 to 8"):
            model.generate(PROMPT, passages=wrong)


@pytest.mark.slow
def test_a_run_has_passages_too(finished):
    model = load_model(finished.directory, Hardware("cpu", 1))
    assert len(model.passages(PROMPT, count=3)) == 3
    assert len(model.generate(PROMPT, passages=2, max_tokens=2).passages) == 2


@pytest.mark.slow
def test_the_command_names_them(folder):
    found = spalm("generate", folder, PROMPT, "--max-tokens", 3, "--passages", 1)
    assert found.returncode == 0, found.stderr
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("passage of ")]
    assert line.startswith("passage of doc")
    assert ", token " in line
    assert "passage of" not in spalm("generate", folder, PROMPT, "--max-tokens", 3).stderr
    assert spalm("generate", folder, PROMPT, "--passages", 9).returncode == 2
    assert refused("generate", folder / "nothing", PROMPT, "--passages", 1)
