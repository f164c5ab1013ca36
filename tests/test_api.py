"""The public API: what the README shows, run as it stands there, and what it says of texts, memories and runs."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import spalm
from spalm.generation import RunModels
from spalm.runs import NETWORKS
from support.facts import make_run, write_documents, write_texts
from support.tiny_models import write_model

ROOT = Path(__file__).parents[1]
CPU = spalm.Execution(spalm.Hardware("cpu", 1))


@pytest.fixture(scope="module")
def model(attached_folder) -> spalm.Model:
    return spalm.load(attached_folder, execution=CPU)


@pytest.fixture(scope="module")
def run_model(finished) -> spalm.Model:
    return spalm.load(finished.directory, "spalm", execution=CPU)


@pytest.fixture(params=["model", pytest.param("run_model", marks=pytest.mark.slow)])
def any_model(request) -> spalm.Model:
    return request.getfixturevalue(request.param)


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if "spalm.attach" in block)


@pytest.mark.slow
def test_the_readmes_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """In a folder where the model's name, ~/articles and the recipe `demo` are tiny stand-ins."""
    pytest.importorskip("transformers")
    articles = tmp_path / "home" / "articles"
    articles.mkdir(parents=True)
    write_documents(articles, documents=6)
    text = "".join(path.read_text() for path in sorted(articles.iterdir()))
    write_model(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct", "llama", text)
    recipes, texts = tmp_path / "recipes", tmp_path / "texts"
    recipes.mkdir(), texts.mkdir()
    write_texts(texts, documents=5)
    small = make_run(texts, tmp_path / "unused").recipe
    network = small.network.model_copy(update={"layers": 1, "width": 16, "feed_forward": 16})
    training = small.training.model_copy(update={"batch_size": 1, "segment_length": 8, "evaluate_every": 500})
    adaptive = small.adaptive.model_copy(update={"passes": 1})
    small = small.model_copy(update={"network": network, "training": training, "adaptive": adaptive})
    (recipes / "demo.yaml").write_text(small.model_dump_json())
    monkeypatch.setattr("spalm.runs.recipe.recipe_folder", lambda: recipes)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(readme_example(), names)
    shown = capsys.readouterr().out
    assert "spalm-adaptive" in shown
    answer, run = names["answer"], names["run"]
    assert answer.text
    assert answer.text in shown or answer.finish_reason == "length"
    assert {row["model"] for row in run.results} == set(run.rows)
    assert run.recipe.training.steps == 500
    assert run.study("gates").tables["histogram"].rows
    assert "notes.md" not in {document.name for document in names["model"].memory.documents()}
    assert (tmp_path / "runs" / "attached" / "config.json").is_file()


def test_importing_it_is_light():
    """No torch, no numpy; the public names come when they are used."""
    code = "import sys, spalm; dir(spalm); print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in spalm.__all__:
        assert getattr(spalm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        spalm.nothing  # noqa: B018


def test_an_answer_is_its_stream(any_model):
    answer = any_model.generate("ka1 lo3", max_tokens=12, temperature=1.0, seed=5)
    chunks = list(any_model.stream("ka1 lo3", max_tokens=12, temperature=1.0, seed=5))
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert [token.id for token in answer.tokens] == [token.id for chunk in chunks for token in chunk.tokens]
    assert answer.citations == chunks[-1].citations
    for citation in answer.citations:
        assert citation.span == (citation.start, citation.end)
        assert (citation.document, citation.offset, citation.weight) == (
            citation.sources[0].document,
            citation.sources[0].offset,
            citation.sources[0].weight,
        )
    assert any_model.generate("ka1 lo3", max_tokens=3, cite=False).citations == []


def test_wrong_options_are_refused_by_name(model):
    with pytest.raises(spalm.InputError, match="unknown key 'max_token'"):
        model.generate("ka1", max_token=3)
    with pytest.raises(spalm.InputError, match="top_p = 0"):
        model.generate("ka1", top_p=0)


def test_scores_are_the_decoders(any_model):
    text = "ka1 lo3 mi4 .\nka2 lo5"
    score, tokeniser = any_model.score(text), any_model.tokeniser
    tokens = [tokeniser.start, *tokeniser.encode([text.encode()])[0].tolist()]
    decoder = any_model.decoder()
    encoded = decoder.feed(tokens[:-1])
    expected = [
        decoder.predict(encoded[place : place + 1], tokens[place])[0].log_probabilities[0, tokens[place + 1]]
        for place in range(len(tokens) - 1)
    ]
    plain = any_model.network.target_log_probabilities(encoded.hidden, torch.tensor(tokens[1:]))
    np.testing.assert_allclose([each.log_probability for each in score.tokens], expected, atol=1e-3)
    np.testing.assert_allclose([each.without_memory for each in score.tokens], plain, atol=1e-3)
    assert tokeniser.separator.join(each.text for each in score.tokens).split() == text.split()
    assert score.perplexity == pytest.approx(math.exp(-np.mean([each.log_probability for each in score.tokens])))
    assert score.perplexity_without_memory == pytest.approx(math.exp(-float(plain.mean())), rel=1e-3)
    with pytest.raises(spalm.InputError, match="the text is empty"):
        any_model.score("")


def test_an_explanation_adds_up(any_model):
    text = "ka1 lo3 mi4 .\nka2 lo5"
    found = any_model.explain(text, position=3)
    assert found.probability == pytest.approx(math.exp(any_model.score(text).tokens[3].log_probability), rel=1e-3)
    assert 0 < sum(each.weight for each in found.neighbours) <= 1 + 1e-3
    assert [each.distance for each in found.neighbours] == sorted(each.distance for each in found.neighbours)
    with pytest.raises(spalm.InputError, match="the passage has"):
        any_model.explain(text, position=99)


def test_a_runs_networks_are_loaded_once(finished, monkeypatch):
    """For the server, the explorer and transformers together; the encoder is the transformer itself."""
    loaded: list[str] = []
    for name in ("TrainedModel", "TrainedSpalm"):
        kind = getattr(__import__("spalm.runs.finished_run", fromlist=[name]), name)

        def load(self, device, original=kind.load):
            loaded.append(self.directory.name)
            return original(self, device)

        monkeypatch.setattr(kind, "load", load)
    opened = spalm.load(finished.directory, execution=CPU)
    assert loaded == ["transformer-xl"]
    opened.generate("ka1", max_tokens=2)
    opened.explain("ka1 lo2", position=1)
    assert isinstance(opened.models, RunModels)
    opened.models.variants()
    assert sorted(loaded) == sorted(NETWORKS)
