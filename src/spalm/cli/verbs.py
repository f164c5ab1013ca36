"""All verbs, in the order in which `spalm --help` lists them."""

from typer.main import get_command

# isort: off
from spalm.cli.application import app
from spalm.cli import pipeline
from spalm.cli import knn
from spalm.cli import study
from spalm.cli import models
# isort: on

__all__ = ["command", "knn", "models", "pipeline", "study"]

command = get_command(app)
"""The `spalm` command with all its verbs."""
