"""The house: who may import whom, what the core needs, and that recipes and README tell the truth."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spalm.lm import Transformer, parameter_count
from spalm.runs.recipe import read_recipe, recipe_folder
from spalm.semiparametric import Spalm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "spalm"
GROUND = {"artifact", "console", "errors", "openmp", "settings"}
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists() and path.name != "cli")
RECIPES = sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def imported(path: Path) -> set[str]:
    """The parts of spalm that a file imports, by their first name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "spalm":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spalm."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("spalm.")}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_from_the_folders_before_it(folder):
    allowed = GROUND | {other for other in FOLDERS if other <= folder}
    for path in (PACKAGE / folder).rglob("*.py"):
        assert imported(path) <= allowed, path


def test_the_ground_floor_stands_on_itself():
    for name in GROUND:
        assert imported(PACKAGE / f"{name}.py") <= GROUND


def test_import_needs_only_the_core():
    """No optional package is imported by importing everything that the command line does."""
    optional = ["tensorboard", "pytest", "hypothesis", "transformers", "ray", "scann"]
    code = f"import sys, spalm.cli; print([name for name in {optional} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_and_built(name):
    recipe = read_recipe(name, [])
    size = recipe.corpus.tokeniser.size or 256
    with torch.device("meta"):
        count = parameter_count(Transformer(recipe.network, size))
    paper = {"wikitext103": 142e6, "wmt19": 148e6, "enwik8": 104e6}
    if name in paper:
        assert count == pytest.approx(paper[name], rel=0.03)
    assert recipe.model("transformer").training.memory_length == 0
    assert recipe.model("transformer-xl").training.memory_length == recipe.training.memory_length > 0
    spalm = recipe.model("spalm")
    assert spalm.spalm.gate.neighbours == recipe.neighbours.count
    with torch.device("meta"):
        extra = parameter_count(Spalm(Transformer(spalm.network, size), spalm.spalm.gate)) - count
    assert extra == spalm.network.width * (spalm.network.width + 1), "the gate is all that SPALM adds"


def test_the_papers_set_ups_are_the_papers():
    for name, layers, segment, memory, at_test, size in [
        ("wikitext103", 18, 512, 512, [512, 3072], 33_060),
        ("wmt19", 18, 512, 512, [512], 50_259),
        ("enwik8", 24, 768, 1536, [4096], None),
    ]:
        recipe = read_recipe(name, [])
        assert recipe.network.layers == layers
        assert recipe.network.width == 512
        assert recipe.network.dropout == 0.25
        assert recipe.training.batch_size == 256
        assert (recipe.training.segment_length, recipe.training.memory_length) == (segment, memory)
        assert recipe.evaluation.memory_lengths == at_test
        assert recipe.corpus.tokeniser.size == size
        assert recipe.neighbours.count == (2 if name == "enwik8" else 4)


@pytest.mark.parametrize("name", ["wikitext103", "wmt19", "enwik8"])
def test_a_network_of_the_papers_shape_takes_a_step(name):
    """Depth, heads, cutoffs and memory of the paper's recipes, narrowed so that a CPU can step them."""
    from spalm.corpus import Batch
    from spalm.lm import segment_loss

    recipe = read_recipe(name, [])
    network = recipe.network.model_copy(update={"width": 16, "head_width": 4, "feed_forward": 16})
    size = recipe.corpus.tokeniser.size or 256
    model = Transformer(network, size).initialise(0)
    text = torch.randint(size, (2, 24))
    memory = []
    for first in range(0, 24, 12):
        part = text[:, first : first + 12]
        loss, memory = segment_loss(model, 16, Batch(None, part, part), memory)
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert memory[0].shape == (2, 16, 16)


def test_the_readme_names_commands_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z]+)\b", readme):
        assert target in targets, target
    for path in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / path).exists(), path
    from typer.main import get_command

    from spalm.cli import app

    verbs = get_command(app).commands
    for verb in re.findall(r"^\$? ?(?:\S+/)?spalm ([a-z]+)", readme, re.MULTILINE):
        assert verb in verbs, verb
