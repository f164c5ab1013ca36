"""Sets how OpenMP's threads wait for work. It must run before the first library that uses OpenMP is loaded."""

import os

POLICY = "OMP_WAIT_POLICY"
"""Environment variable of the OpenMP standard by which users choose how the threads of any runtime wait."""
NO_SPINNING = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Environment variables that make waiting threads sleep, for GNU's runtime and for Intel's and LLVM's."""


def wait_without_spinning() -> None:
    """Makes waiting threads of OpenMP sleep instead of spin, unless the environment says how they are to wait.

    A spinning thread uses up a core that a working one needs when another process shares the machine. Waking a thread
    takes time too, so training and reading divide the lanes of a batch among threads, which then wait only once a step.
    """
    if POLICY not in os.environ:
        for variable, value in NO_SPINNING.items():
            os.environ.setdefault(variable, value)
