"""What several tests of serving need: models open for the server, and the same as models of transformers."""

from importlib import import_module

import pytest

from spalm.generation.model import Live, live_attached
from support.servers import TEMPLATE, copied, open_attached


@pytest.fixture(scope="module")
def attached(attached_folder, tmp_path_factory):
    return open_attached(copied(attached_folder, tmp_path_factory.mktemp("server") / "tiny", TEMPLATE))


@pytest.fixture(scope="module")
def live(attached) -> Live:
    return live_attached(attached)


@pytest.fixture(scope="module")
def auto():
    """transformers, whose auto classes know the models of spalm."""
    transformers = pytest.importorskip("transformers")
    import_module("spalm.serving.hugging_face")
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


@pytest.fixture(params=["attached", "own"])
def both(request):
    names = ("model", "tokenizer") if request.param == "attached" else ("own_model", "own_tokenizer")
    return tuple(map(request.getfixturevalue, names))
