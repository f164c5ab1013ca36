"""Compilation of loops with numba."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def compiled(**options: Any) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Returns a decorator that compiles a loop when it is first called; the result is cached on disk where possible.

    The loop releases Python's lock, so that threads run side by side. `options` are further ones of numba.
    """

    def compile(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        # Tests may wrap the function in type checks, which numba cannot compile.
        loop: Callable[_Parameters, _Result] = inspect.unwrap(function)
        try:
            return numba.njit(loop, cache=True, nogil=True, **options)
        except RuntimeError:  # no folder for the cache: compiled again in every process
            return numba.njit(loop, nogil=True, **options)

    return compile
