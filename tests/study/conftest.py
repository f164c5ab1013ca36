"""Fixtures that the tests of the analyses share: a finished run's test split and its scores."""

import numpy as np
import pytest

from spalm.study import AnalysisRequest

SPLIT = "test"


@pytest.fixture(scope="module")
def on_test(finished) -> AnalysisRequest:
    return AnalysisRequest(finished, SPLIT)


@pytest.fixture(scope="module")
def text(finished):
    return finished.corpus.split(SPLIT)


@pytest.fixture(scope="module")
def log_probabilities(finished) -> dict[str, list[float]]:
    """Straight from the files."""
    folders = {row["model"]: finished.directory / row["evaluation"] for row in finished.results}
    return {
        model: np.fromfile(folder / f"{SPLIT}.log_probabilities", "<f4").tolist() for model, folder in folders.items()
    }
