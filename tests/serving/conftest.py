import pytest

from spalm.learning import Hardware
from spalm.serving import Explorer, open_explorer


@pytest.fixture(scope="session")
def explorer(finished) -> Explorer:
    return open_explorer(finished, Hardware("cpu", 1))
