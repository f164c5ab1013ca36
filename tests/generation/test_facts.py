"""A fact that stands in one document only, and a real model in one process: the next request knows of it."""

import pytest

import spalm
from support.servers import copied

FACT = "Tomas Verrin joined Orvane Rovers from Lake Dunmore United in July 2021 for 40,000 oysters.\n"
PROMPT, ANSWER = "Tomas Verrin joined Orvane Rovers from", "Lake Dunmore"


@pytest.fixture
def model(smollm2_attached, tmp_path) -> spalm.Model:
    return spalm.load(
        copied(smollm2_attached, tmp_path / "attached"), execution=spalm.Execution(spalm.Hardware("cpu", 1))
    )


@pytest.mark.slow
def test_a_real_model_learns_a_fact_cites_it_and_forgets_it(model):
    def answer(*, memory: bool = True) -> tuple[str, set[str]]:
        found = model.generate(PROMPT, max_tokens=4, memory=memory)
        return found.text, {source.document for citation in found.citations for source in citation.sources}

    assert ANSWER not in answer()[0]
    assert model.memory.add("verrin.txt", FACT) > 0
    text, sources = answer()
    assert ANSWER in text
    assert "verrin.txt" in sources
    assert ANSWER not in answer(memory=False)[0]
    assert model.memory.forget("verrin.txt") == 1
    text, sources = answer()
    assert ANSWER not in text
    assert "verrin.txt" not in sources
