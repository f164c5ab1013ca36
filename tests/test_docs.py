"""The documentation: its examples run, what it names exists, its references and figures are complete."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from spalm.api import CompletedRun
from spalm.memory import remember, source_of_text
from spalm.neighbours import Searcher, exact_search, serial_map
from spalm.planning import Cluster, PlannedMemory, format_bytes, format_count, parse_count, plan_memory
from spalm.runs.recipe import read_recipe
from support.commands import spalm
from support.stub_memory import StubEncoder, new_memory, random_texts, stream

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCALE = DOCS / "scale.md"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("results/*.md")]


def python_blocks(page: Path) -> list[str]:
    """Returns the Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def examples() -> list[str]:
    """Returns the examples of the vector database: the class, and its use."""
    return [block for block in python_blocks(SCALE) if "Qdrant" in block]


@pytest.fixture
def database(monkeypatch):
    """Qdrant as its own client runs it inside a process: the names of the first example, the address replaced."""
    library = pytest.importorskip("qdrant_client")
    shared = library.QdrantClient(":memory:")
    monkeypatch.setattr(library, "QdrantClient", lambda _: shared)
    names: dict = {}
    exec(examples()[0], names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page):
    assert "@@" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_of_the_project_that_a_page_names_exist(page):
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        if "/" in name:
            assert (ROOT / name).exists() or (ROOT / "src" / "spalm" / name).exists(), name


def test_the_map_has_twenty_questions_or_more():
    questions = re.findall(r"^\| (.+\?) \| `([\w/]+\.py)` \|$", (DOCS / "design.md").read_text("utf-8"), re.MULTILINE)
    assert len(questions) == len({file for _, file in questions}) >= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_import_what_there_is(page):
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spalm"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_examples_of_memory_and_neighbours_run(finished, tmp_path):
    index = tmp_path / "index"
    made = spalm("index", finished.directory / "memory", "--out", index, "--kind", "exact")
    assert made.returncode == 0, made.stderr
    names: dict = {}
    for page in ("memory.md", "neighbours.md"):
        for block in python_blocks(DOCS / page):
            code = block.replace("runs/demo/index", str(index)).replace("runs/demo", str(finished.directory))
            exec(code, names)
    assert names["ids"].shape == (5, 8)
    assert names["ids"][:, 0].tolist() == list(range(5))


def test_the_example_of_transformers_runs(attached_folder, tmp_path, capsys):
    (block,) = python_blocks(DOCS / "pretrained.md")
    block = block.replace("runs/attached", str(attached_folder)).replace('"copy"', repr(str(tmp_path / "copy")))
    exec(block, {})
    assert capsys.readouterr().out.strip()
    assert (tmp_path / "copy" / "config.json").exists()


@pytest.mark.slow
def test_the_examples_of_the_api_run(attached_folder, finished, tmp_path, capsys):
    """All lines but those that attach a memory and carry out a recipe: these take long, and have tests of their own."""
    folder = shutil.copytree(attached_folder, tmp_path / "attached")
    with_memory, of_a_run, _ = (
        re.sub(r"^.*spalm\.(attach|run)\(.*$", "", block, flags=re.MULTILINE)
        for block in python_blocks(DOCS / "api.md")
    )
    exec(with_memory.replace("runs/attached", str(folder)), {})
    exec(of_a_run.replace("runs/short", str(finished.directory)), {"run": CompletedRun(finished.directory)})
    assert "transformer-xl" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["api.md", "knn.md"])
def test_the_examples_of_a_graph_of_neighbours_run(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    vectors = np.random.default_rng(1).standard_normal((300, 8)).astype(np.float32)
    np.save("embeddings.npy", vectors)
    names: dict = {"vectors": vectors}
    for block in python_blocks(DOCS / page):
        if "knn_graph" in block:
            exec(block, names)
    assert capsys.readouterr().out.startswith("1.0 ")
    assert (names["labels"] if "labels" in names else names["matrix"]).shape[0] == 300


@pytest.fixture(scope="session")
def hooks():
    """The module that generates pages of the site."""
    pytest.importorskip("mkdocs")
    description = spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = module_from_spec(description)
    description.loader.exec_module(module)
    return module


def test_references_are_complete(hooks):
    from spalm.cli.verbs import command as group

    page = hooks.commands_page()
    for name, command in group.commands.items():
        assert f"## spalm {name}\n" in page
        for parameter in command.params:
            assert all(option in page for option in parameter.opts if option.startswith("-"))
    assert "| `training.steps` |" in hooks.settings_page()
    packages = {path.parent.name for path in (ROOT / "src" / "spalm").glob("*/__init__.py")}
    assert set(hooks.PACKAGES) == packages - {"cli"}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(hooks, tmp_path):  # noqa: ARG001
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=\"?(https?://[^\" >]+)", page.read_text("utf-8"))
        assert not fetched, page


def test_a_vector_database_proposes_and_the_memory_decides(database, tmp_path):
    encoder = StubEncoder()
    memory = new_memory(tmp_path, encoder)
    for number in range(2):
        text = stream(random_texts(np.random.default_rng(number), 40, f"batch-{number}"))
        remember(memory, encoder, text, source=source_of_text(text))
        if not number:
            index = database["Qdrant"](database["QdrantClient"]("anywhere"), "test", memory.width)
            searcher = Searcher(memory, index, next_id=0)
            assert searcher.catch_up()
            known = searcher.next_id
    memory.forget(["batch-0-3", "batch-1-5"])

    def agrees(searcher: Searcher) -> bool:
        entries = memory.entries()
        queries = entries.keys(0, 40).astype(np.float32) + 0.01
        _, distances = searcher.search(queries, 5)
        return np.allclose(distances, exact_search(queries, entries, 5, parallel=serial_map)[1], atol=1e-3)

    assert agrees(searcher)  # the second batch is searched beside the database
    assert searcher.catch_up()
    assert agrees(searcher)
    assert index.client.count("test").count == len(memory.entries())
    assert agrees(Searcher(memory, index, known))


@pytest.mark.slow
def test_a_model_writes_and_is_served_by_it(database, attached_folder, capsys, monkeypatch):
    from fastapi.testclient import TestClient

    served = []
    monkeypatch.setattr("spalm.server.serve", lambda app, *_, **__: served.append(app))
    exec(examples()[1].replace("runs/attached", str(attached_folder)), database)
    assert capsys.readouterr().out.startswith("[")  # the list of citations
    searched = database["searcher"].searched
    assert searched > 0
    asked = {"model": attached_folder.name, "prompt": "ka1 lo2", "max_tokens": 3}
    with TestClient(served[0]) as client:
        assert client.post("/v1/completions", json=asked).status_code == 200
    assert database["searcher"].searched > searched


@pytest.mark.parametrize(("recipe", "tokens"), [("wikitext103", "103M"), ("wmt19", "852M"), ("wmt19", "1T")])
def test_the_costs_in_the_docs_are_what_is_computed(recipe, tokens):
    cluster = Cluster(machines=16, cores=64, ram=256 << 30, storage=1 << 30)
    planned = plan_memory(PlannedMemory.of(read_recipe(recipe, []), parse_count(tokens)), cluster)
    said = SCALE.read_text(encoding="utf-8")
    for stage in planned["stages"]:
        sizes = " | ".join(format_bytes(stage[name]) for name in ("ram", "kept", "scratch", "read", "written"))
        row = f"| {tokens} | {stage['name']} | {stage['core_hours']:,.1f} | {stage['hours']:,.2f} | {sizes} |"
        assert row in said
    for limit in planned["limits"]:
        assert f"| {format_count(limit['tokens'])} tokens | {limit['what']} | {limit['remedy']} |" in said
