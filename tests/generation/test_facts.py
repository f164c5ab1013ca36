"""A fact that stands in one document only, and a real model in one process: the next request knows of it."""

import sysconfig
from pathlib import Path

import pytest

import spalm
from spalm.attachment import AttachSettings

FACT = "Tomas Verrin joined Orvane Rovers from Lake Dunmore United in July 2021 for 40,000 oysters.\n"
PROMPT, ANSWER = "Tomas Verrin joined Orvane Rovers from", "Lake Dunmore"
SETTINGS = AttachSettings.parse(
    {
        "neighbours": 16,
        "positions": 128,
        "memory": "both",
        "adaptive": {"neighbours": 16, "passes": 1},
        "combiner": "knn-lm",
        "knn": {"lambdas": [0.8], "counts": [4], "temperatures": [20.0]},
    },
    "test",
)
"""What a mixture learns from so little text is not to trust it: kNN-LM goes by the nearest."""


@pytest.fixture
def model(smollm2, tmp_path) -> spalm.Model:
    texts, library = tmp_path / "texts", Path(sysconfig.get_paths()["stdlib"])
    texts.mkdir()
    for name in ("bisect", "cmd", "colorsys", "heapq", "linecache", "queue"):
        (texts / f"{name}.py").write_text((library / f"{name}.py").read_text()[:400])
    execution = spalm.Execution(spalm.Hardware("cpu", 1))
    return spalm.attach(smollm2[1], [texts], tmp_path / "attached", set=SETTINGS.as_json(), execution=execution)


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
