"""A fact that stands in one document only, and a real model in one process: the next request knows of it."""

import sysconfig
from pathlib import Path

import pytest

from spalm.attachment import Attached, AttachSettings, attach, remember_files
from spalm.compute import Hardware
from spalm.generation import Sampling, write
from spalm.generation.model import live_attached

FACT = "Tomas Verrin joined Orvane Rovers from Lake Dunmore United in July 2021 for 40,000 oysters.\n"
PROMPT, ANSWER = "Tomas Verrin joined Orvane Rovers from", "Lake Dunmore"
SETTINGS = AttachSettings.parse(
    {
        "neighbours": 16,
        "positions": 256,
        "combiner": "knn-lm",
        "knn": {"lambdas": [0.8], "counts": [4], "temperatures": [20.0]},
    },
    "test",
)
"""What a mixture learns from so little text is not to trust it: kNN-LM goes by the nearest."""


@pytest.fixture
def attached(smollm2, tmp_path) -> Attached:
    texts, library = tmp_path / "texts", Path(sysconfig.get_paths()["stdlib"])
    texts.mkdir()
    for name in ("bisect", "cmd", "colorsys", "heapq", "linecache", "queue"):
        (texts / f"{name}.py").write_text((library / f"{name}.py").read_text()[:600])
    return attach(str(smollm2[1]), [texts], tmp_path / "attached", SETTINGS, Hardware("cpu", 1))


@pytest.mark.slow
def test_a_real_model_learns_a_fact_cites_it_and_forgets_it(attached, tmp_path):
    live = live_attached(attached)

    def answer(use_memory: bool = True) -> tuple[str, str]:
        parts: list[str] = []
        citations = write(live, PROMPT, Sampling(max_tokens=4), True, use_memory, parts.append)
        return "".join(parts), "\n".join(citations)

    assert ANSWER not in answer()[0]
    (tmp_path / "verrin.txt").write_text(FACT)
    remember_files(attached, [tmp_path / "verrin.txt"])
    text, citations = answer()
    assert ANSWER in text
    assert "verrin.txt, token" in citations
    assert ANSWER not in answer(use_memory=False)[0]
    attached.memory.forget(["verrin.txt"])
    text, citations = answer()
    assert ANSWER not in text
    assert "verrin.txt" not in citations
