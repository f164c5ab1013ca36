"""docs/scale.md: its examples, run as they stand, and its figures."""

import re
from pathlib import Path

import numpy as np
import pytest

from spalm.memory import remember, source_of_text
from spalm.neighbours import Searcher, nearest
from spalm.neighbours.workers import in_turn
from spalm.planning import Cluster, parse_count, plan
from spalm.planning.plan import in_bytes, in_count
from spalm.runs.recipe import read_recipe
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

SCALE = Path(__file__).parents[1] / "docs" / "scale.md"


def examples() -> list[str]:
    """Those of the vector database: the class, and its use."""
    blocks = re.findall(r"```python\n(.*?)```", SCALE.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if "Qdrant" in block]


@pytest.fixture
def database(monkeypatch):
    """Qdrant as its own client runs it inside a process: the names of the first example, the address replaced."""
    library = pytest.importorskip("qdrant_client")
    shared = library.QdrantClient(":memory:")
    monkeypatch.setattr(library, "QdrantClient", lambda _: shared)
    names: dict = {}
    exec(examples()[0], names)
    return names


def test_nothing_is_left_to_be_filled_in():
    root = SCALE.parents[1]
    for path in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("results/*.md")]:
        assert "@@" not in path.read_text(encoding="utf-8"), path


def test_a_vector_database_proposes_and_the_memory_decides(database, tmp_path):
    encoder = StubEncoder()
    memory = new_memory(tmp_path, encoder)
    for number in range(2):
        text = stream(random_texts(np.random.default_rng(number), 40, f"batch-{number}"))
        remember(memory, encoder, text, source_of_text(text))
        if not number:
            index = database["Qdrant"](database["QdrantClient"]("anywhere"), "test", memory.width)
            searcher = Searcher(memory, index, upto=0)
            assert searcher.catch_up()
            known = searcher.upto
    memory.forget(["batch-0-3", "batch-1-5"])

    def agrees(searcher: Searcher) -> bool:
        entries = memory.entries()
        queries = entries.keys(0, 40).astype(np.float32) + 0.01
        _, distances = searcher.search(queries, 5)
        return np.allclose(distances, nearest(queries, entries, 5, in_turn)[1], atol=1e-3)

    assert agrees(searcher)  # the second batch is searched beside the database
    assert searcher.catch_up()
    assert agrees(searcher)
    assert index.client.count("test").count == len(memory.entries())
    assert agrees(Searcher(memory, index, known))


def test_a_model_writes_and_is_served_by_it(database, attached_folder, capsys, monkeypatch):
    from fastapi.testclient import TestClient

    served = []
    monkeypatch.setattr("spalm.serving.serve", lambda app, *_: served.append(app))
    exec(examples()[1].replace("runs/attached", str(attached_folder)), database)
    said = capsys.readouterr().out
    assert "token" in said or "decided nothing" in said
    searched = database["searcher"].searched
    assert searched > 0
    asked = {"model": attached_folder.name, "prompt": "ka1 lo2", "max_tokens": 3}
    with TestClient(served[0]) as client:
        assert client.post("/v1/completions", json=asked).status_code == 200
    assert database["searcher"].searched > searched


@pytest.mark.parametrize(("recipe", "tokens"), [("wikitext103", "103M"), ("wmt19", "852M"), ("wmt19", "1T")])
def test_the_costs_in_the_docs_are_what_is_computed(recipe, tokens):
    cluster = Cluster(machines=16, cores=64, ram=256 << 30, storage=1 << 30)
    planned = plan(read_recipe(recipe, []).memory_of(parse_count(tokens)), cluster)
    said = SCALE.read_text(encoding="utf-8")
    for stage in planned["stages"]:
        sizes = " | ".join(in_bytes(stage[name]) for name in ("ram", "kept", "scratch", "read", "written"))
        row = f"| {tokens} | {stage['name']} | {stage['core_hours']:,.1f} | {stage['hours']:,.2f} | {sizes} |"
        assert row in said
    for limit in planned["limits"]:
        assert f"| {in_count(limit['tokens'])} tokens | {limit['what']} | {limit['remedy']} |" in said
