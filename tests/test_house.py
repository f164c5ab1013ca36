"""The house: which room may import which, how large its parts may be, what the core needs, and that recipes and README
tell the truth."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spalm.lm import Transformer, parameter_count
from spalm.runs.recipe import read_recipe, recipe_folder
from spalm.semiparametric import Spalm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "spalm"
GROUND_FLOOR = [
    "choices",
    "errors",
    "files",
    "digests",
    "settings",
    "console",
    "paths",
    "manifest",
    "artifact",
    "openmp",
]
"""Modules that every room may import; among themselves they follow the same rule."""
ROOMS = [
    "corpus",
    "compute",
    "training",
    "lm",
    "memory",
    "neighbours",
    "semiparametric",
    "runs",
    "attachment",
    "generation",
    "maintenance",
    "server",
    "study",
    "planning",
    "cli",
]
"""The rooms in the order of the data: a room imports only from itself and from those before it."""
FRONT_DOOR = ["__init__", "api"]
"""The public API: it sees every room but the command line."""
FOREIGN_NAMES = {
    *("util", "utils", "common", "helper", "helpers", "misc"),
    *("fast", "legible", "spelling", "following", "within", "best", "ordered", "opened", "writing", "desk", "letters"),
    *("asking", "assigning", "answering", "bulk"),
}
"""File names that do not say what is in the file."""
NAMES_OF_MANY = {"KIND", "VERSION"}
"""Constants that every stage has."""
MAIN = PACKAGE / "__main__.py"
MODULES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted(path.stem for path in recipe_folder().glob("*.yaml"))
MOST_PARAMETERS, MOST_LINES, MOST_MODULES = 6, 350, 12


def imported(path: Path) -> set[str]:
    """Returns the parts of spalm that a file imports anywhere, also inside functions, by their first name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if node.module == "spalm":
                found |= {alias.name for alias in node.names}
            elif (node.module or "").startswith("spalm."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("spalm.")}
    return found - {"__version__"}


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_room_is_in_the_list():
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*GROUND_FLOOR, *FRONT_DOOR, MAIN.stem}


@pytest.mark.parametrize("room", [*GROUND_FLOOR, *ROOMS])
def test_a_room_imports_only_from_itself_and_from_rooms_before_it(room):
    order = [*GROUND_FLOOR, *ROOMS]
    allowed = {*order[: order.index(room) + 1], *(FRONT_DOOR if room == "cli" else [])}
    files = [PACKAGE / f"{room}.py"] if room in GROUND_FLOOR else (PACKAGE / room).rglob("*.py")
    wrong = {named(path): imported(path) - allowed for path in files}
    assert not {path: names for path, names in wrong.items() if names}


def test_the_front_door_does_not_need_the_command_line():
    assert not {path for path in MODULES if path.parent == PACKAGE and "cli" in imported(path)} - {MAIN}


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Yields the functions of a file: name, node, and whether it is a method."""

    def walk(node: ast.AST, prefix: str, in_class: bool) -> Iterator:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child, in_class
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inside = isinstance(child, ast.ClassDef) if is_scope else in_class
            yield from walk(child, f"{name}." if is_scope else prefix, inside)

    yield from walk(ast.parse(path.read_text()), "", in_class=False)


def _decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> int:
    """Returns the number of named parameters, without self and cls."""
    arguments = function.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    return count - (method and "staticmethod" not in _decorators(function))


def test_no_function_has_more_than_six_parameters():
    """The verbs of the command line and compiled kernels are excepted."""
    excepted = re.compile(r"^_?compiled\b|\bn?jit\b|^intrinsic\b")
    found = [
        f"{named(path)}:{function.lineno} {name}"
        for path in MODULES
        if path.parent.name != "cli"
        for name, function, method in _functions(path)
        if not any(excepted.search(decorator) for decorator in _decorators(function))
        and _parameters(function, method) > MOST_PARAMETERS
    ]
    assert not found, "\n".join(found)


def test_no_module_is_too_long():
    lengths = {named(path): len(path.read_text().splitlines()) for path in MODULES}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}


def test_no_folder_has_too_many_modules():
    folders = {path.parent for path in MODULES}
    counts = {named(folder): sum(path.stem != "__init__" for path in folder.glob("*.py")) for folder in folders}
    assert not {folder: count for folder, count in counts.items() if count > MOST_MODULES}


def test_the_words_are_the_fields():
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", ".html", ".js", ".css", ".yaml"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"kitchen|\bdesk\b|shelf", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_no_two_public_things_have_one_name():
    """Excepted: what the public API and the command line call by the name of the function behind it."""
    places: dict[str, set[str]] = {}
    for path in MODULES:
        if path.parent == PACKAGE or path.parent.name == "cli":
            continue
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            for target in targets:
                name = getattr(target, "name", getattr(target, "id", "_"))
                if not name.startswith("_"):
                    places.setdefault(name, set()).add(named(path))
    twice = {name: files for name, files in places.items() if len(files) > 1 and name not in NAMES_OF_MANY}
    assert not twice


def test_file_names_say_what_is_in_them():
    assert not [named(path) for path in MODULES if path.stem.strip("_") in FOREIGN_NAMES]
    assert not [named(path) for path in (PACKAGE / "server").rglob("keys.py")], "authentication is auth.py"


def test_no_test_imports_another_test():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] in {"tests", "conftest"} or "test_" in name], path


def test_tests_mirror_the_rooms():
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py")) and path.is_dir()}
    assert folders <= {*ROOMS, "compatibility", "fuzz"}


def modules_after(code: str, *arguments: object) -> set[str]:
    """Returns the top-level names of the modules that a new Python has loaded after running some code."""
    command = [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    found = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return {name.split(".")[0] for name in json.loads(found.stdout.splitlines()[-1])}


def test_import_is_light():
    heavy = {"torch", "numpy", "pydantic", "typer", "rich", "faiss", "numba", "scipy", "matplotlib", "fastapi"}
    optional = {"tensorboard", "transformers", "ray", "scann"}
    found = modules_after("import spalm; dir(spalm); spalm.__version__")
    assert not found & (heavy | optional)
    assert len(found - modules_after("")) < 20, found


@pytest.mark.slow
def test_the_command_line_needs_only_the_core():
    """No optional package is imported by importing everything that the command line does."""
    optional = {"tensorboard", "pytest", "hypothesis", "transformers", "ray", "scann"}
    everything = "import spalm.api, spalm.cli.verbs, spalm.maintenance, spalm.planning, spalm.server"
    assert not modules_after(everything) & optional


def test_help_and_usage_errors_load_no_numerical_library():
    heavy = {"torch", "numpy", "scipy", "numba", "faiss", "transformers", "matplotlib", "fastapi", "yaml"}
    code = "from spalm.cli import entry\nfor line in ('--help', 'run --help', 'run', 'index x --out y --count 0'):"
    assert not modules_after(f"{code}\n    entry.run(line.split())") & heavy


@pytest.mark.slow
def test_generating_imports_no_web_server(attached_folder):
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from spalm.cli import entry\n"
        "assert entry.run(['generate', sys.argv[1], 'ka1 lo2', '--max-tokens', '1']) == 0"
    )
    assert not modules_after(code, attached_folder) & {"fastapi", "uvicorn", "starlette"}


def test_shapes_are_checked_in_the_tests():
    from jaxtyping import TypeCheckError

    from spalm.corpus import Batch

    tokens = torch.zeros(2, 5, dtype=torch.long)
    Batch(np.zeros((2, 5), int), tokens, tokens)
    with pytest.raises(TypeCheckError):
        Batch(np.zeros((2, 3), int), tokens, tokens)


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_and_built(name):
    recipe = read_recipe(name, [])
    size = recipe.corpus.tokeniser.size or 256
    with torch.device("meta"):
        count = parameter_count(Transformer(recipe.network, size))
    paper = {"wikitext103": 142e6, "wmt19": 148e6, "enwik8": 104e6}
    if name in paper:
        assert count == pytest.approx(paper[name], rel=0.03)
    assert recipe.transformer.training.memory_length == 0
    assert recipe.transformer_xl.training.memory_length == recipe.training.memory_length > 0
    spalm = recipe.spalm_model
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
        positions = np.arange(first, first + 12)[None].repeat(2, 0)
        loss, memory = segment_loss(model, 16, Batch(positions, part, part), memory=memory)
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert memory[0].shape == (2, 16, 16)


def test_the_readme_names_commands_and_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"bench-{name}" for name in re.findall(r"BENCHMARKS := (.*)", makefile)[0].split()}
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", readme, re.MULTILINE):
        assert target in targets, target
    for path in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / path).exists(), path
    from spalm.cli.verbs import command

    verbs = command.commands
    examples = "".join(re.findall(r"```(?:\w*)\n(.*?)```", readme, re.DOTALL))
    for verb in re.findall(r"^\$? ?(?:\S+/)?spalm ([a-z]+)", examples, re.MULTILINE):
        assert verb in verbs, verb


def locked(name: str) -> dict[str, str]:
    """Returns the requirements of a lock by the names of the packages, each with its version and hashes."""
    blocks = (ROOT / "locks" / f"{name}.txt").read_text().replace(" \\\n", "").splitlines()
    return {re.split(r"\[|==", block)[0]: block for block in blocks}


def test_everything_that_make_installs_is_locked_by_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    wanted = {
        "dev": [
            *project["project"]["dependencies"],
            *(each for name in ("dev", "docs", "pretrained", "ray") for each in extras[name]),
        ],
        "build": groups["build"] + project["build-system"]["requires"],
        "release": groups["release"],
    }
    for name, requirements in wanted.items():
        found = locked(name)
        names = {re.split(r"[\[<>=; ]", each)[0] for each in requirements} - {"spalm"}
        assert names <= {*found}, names - {*found}
        assert all(re.search(r"==\S+( ; .*?)? +--hash=sha256:[0-9a-f]{64}", block) for block in found.values())
        assert not [block for block in found.values() if "/" in block], "a lock names no host and no path"
    pinned = re.findall(r"^torch==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert f"torch=={pinned}+cpu ; " in (ROOT / "locks" / "dev.txt").read_text()
    assert "--require-hashes" in (ROOT / ".ci" / "run").read_text()
