"""The notebooks of examples/, run from their first cell to the last on tiny models and texts."""

import os
from pathlib import Path

import pytest

from support.facts import make_run, write_documents, write_texts
from support.tiny_models import END, write_model

FOLDER = Path(__file__).parents[1] / "examples"


def run_notebook(name: str, folder: Path, **parameters) -> list[str]:
    """Runs a notebook with other parameters, in a folder of its own. Returns what its cells printed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    known = {line.split(" = ")[0] for line in cell.source.splitlines()}
    assert set(parameters) <= known
    cell.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute(env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    return [str(output.get("text", output.get("data"))) for output in outputs]


@pytest.mark.slow
def test_a_memory_for_a_pretrained_model(tmp_path):
    pytest.importorskip("transformers")
    texts = tmp_path / "texts"
    texts.mkdir()
    write_documents(texts, documents=12)
    model = write_model(tmp_path / "model", "llama", "".join(path.read_text() for path in sorted(texts.iterdir())))
    settings = {"context": 64, "stride": 48, "neighbours": 32, "positions": 500}
    # A mixture that learned on a random model trusts nothing: kNN-LM goes by the nearest.
    settings |= {"combiner": "knn-lm", "knn": {"lambdas": [0.9], "counts": [4], "temperatures": [0.5]}}
    shown = run_notebook(
        "memory_for_a_pretrained_model.ipynb",
        tmp_path,
        MODEL=str(model),
        TEXTS=[str(texts)],
        SETTINGS=settings,
        PROMPT="ka1 lo3",
        NOTE="nu3 ka5 lo77 .\n",
        QUESTION=f"{END}nu3 ka5",
    )
    (before_and_after,) = [text for text in shown if text.startswith("before:")]
    before, after = before_and_after.split("after: ")
    assert "lo77" in after
    assert "lo77" not in before
    assert "SpalmForCausalLM" in shown[-1]


@pytest.mark.slow
def test_the_papers_table(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    write_texts(texts, documents=5)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(make_run(texts, tmp_path / "unused").recipe.model_dump_json())
    shown = run_notebook("the_papers_table.ipynb", tmp_path, RECIPE=str(recipe), SETTINGS={"training.steps": 60})
    assert any("spalm-adaptive" in text for text in shown)
    assert sum("image/png" in text for text in shown) == 2
