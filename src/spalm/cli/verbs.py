"""All verbs, in the order in which `spalm --help` lists them."""

# isort: off
from spalm.cli.application import app
from spalm.cli import pipeline
from spalm.cli import study
from spalm.cli import models
# isort: on

__all__ = ["app", "models", "pipeline", "study"]
