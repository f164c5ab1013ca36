"""spalm: language models with a short-term and a long-term memory.

The folders are the pipeline, in alphabetical order: corpus -> learning -> lm -> study.
Each imports only from those before it and from the ground floor (artifact, console, errors, settings).
"""

from spalm.openmp import wait_without_spinning

wait_without_spinning()

__version__ = "0.1.0"
