"""Sets how OpenMP's threads wait for work. It must run before the first library that uses OpenMP is loaded."""

import ctypes
import os
from pathlib import Path

POLICY = "OMP_WAIT_POLICY"
"""Environment variable of the OpenMP standard by which users choose how the threads of any runtime wait."""
WAITING = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""Environment variables that make waiting threads sleep: soon in GNU's runtime, at once in Intel's and LLVM's."""


def spin_briefly() -> None:
    """Makes waiting threads of OpenMP spin for some microseconds and then sleep, unless the environment says otherwise.

    A thread that spins on uses up a core that a working one needs when another process shares the machine. One that
    sleeps at once takes long to wake: llama.cpp's threads, which wait for each other hundreds of times in a pass, then
    run at half their speed.
    """
    if POLICY not in os.environ:
        for variable, value in WAITING.items():
            os.environ.setdefault(variable, value)


def end_idle_threads() -> None:
    """Ends the threads with which OpenMP helped the calling thread; they are started again when they are needed.

    GNU's runtime hardly lets threads spin when there are more of them than cores. Where one thread opened a model and
    another works with it, the work is therefore slower as long as the helpers of the first are there.
    """
    import torch

    soft_pause = 1
    for runtime in Path(torch.__file__).with_name("lib").glob("libgomp*.so*"):
        ctypes.CDLL(str(runtime)).omp_pause_resource_all(soft_pause)
