"""Sets how OpenMP's threads wait for work. It must run before the first library that uses OpenMP is loaded."""

import os

POLICY = "OMP_WAIT_POLICY"
"""Environment variable of the OpenMP standard by which users choose how the threads of any runtime wait."""
WAITING = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0", POLICY: "ACTIVE"}
"""Environment variables that make waiting threads sleep: soon in GNU's runtime, at once in Intel's and LLVM's.

Without the policy, GNU's runtime cuts the spinning to a twentieth as soon as a second thread of Python has used OpenMP,
which is always so in a server.
"""


def spin_briefly() -> None:
    """Makes waiting threads of OpenMP spin for some microseconds and then sleep, unless the environment says otherwise.

    A thread that spins on uses up a core that a working one needs when another process shares the machine. One that
    sleeps at once takes long to wake: llama.cpp's threads, which wait for each other hundreds of times in a pass, then
    run at half their speed.
    """
    if POLICY not in os.environ:
        for variable, value in WAITING.items():
            os.environ.setdefault(variable, value)
