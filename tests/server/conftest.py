"""Fixtures that the tests of the server share: an attached model, open, with a chat template."""

import pytest

from spalm.attachment import Attached
from spalm.generation import AttachedModels, Model, model_of
from support.servers import TEMPLATE, copied, open_attached


@pytest.fixture(scope="module")
def attached(attached_folder, tmp_path_factory) -> Attached:
    return open_attached(copied(attached_folder, tmp_path_factory.mktemp("server") / "tiny", TEMPLATE))


@pytest.fixture(scope="module")
def model(attached) -> Model:
    return model_of(AttachedModels(attached))
