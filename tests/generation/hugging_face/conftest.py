"""Fixtures that the tests of transformers' interface share: models of both kinds and their tokenisers."""

import pytest

import spalm


@pytest.fixture(scope="module", autouse=True)
def auto():
    """transformers, whose auto classes know the models of spalm."""
    transformers = pytest.importorskip("transformers")
    spalm.register_with_transformers()
    return transformers


@pytest.fixture(scope="module")
def model(auto, attached_folder):
    return auto.AutoModelForCausalLM.from_pretrained(attached_folder)


@pytest.fixture(scope="module")
def tokenizer(auto, attached_folder):
    return auto.AutoTokenizer.from_pretrained(attached_folder, padding_side="left", pad_token="<|end|>")


@pytest.fixture(scope="module")
def own_model(auto, finished):
    return auto.AutoModelForCausalLM.from_pretrained(finished.directory)


@pytest.fixture(scope="module")
def own_tokenizer(auto, finished):
    return auto.AutoTokenizer.from_pretrained(finished.directory)


@pytest.fixture(params=["attached", pytest.param("own", marks=pytest.mark.slow)])
def both(request):
    names = ("model", "tokenizer") if request.param == "attached" else ("own_model", "own_tokenizer")
    return tuple(map(request.getfixturevalue, names))
