"""Checks shapes and types when functions are called, in every module of spalm that annotates arrays with jaxtyping.

Only the tests do that: `install` is called before they import spalm, and jaxtyping's import hook decorates the
functions and dataclasses of those modules with `checked`. Of each function the first calls in each test are checked:
checking all would take several times as long as the tests.
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, _import_hook, jaxtyped

Thing = TypeVar("Thing", bound=Callable)
CALLS = 12
"""Calls of a function that are checked in each test."""
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it
_KNOWN = {np.ndarray, torch.Tensor, Path, str, bytes, bool, float, NoneType}
_GENERIC = {list, dict, tuple, set}
_counts: dict[Callable, int] = {}


def install() -> None:
    """Has the modules that annotate arrays checked from now on; they must not have been imported."""
    spec = find_spec("spalm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    files = [path for path in root.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8")]
    names = [".".join(("spalm", *path.relative_to(root).with_suffix("").parts)) for path in files]
    names = [name.removesuffix(".__init__") for name in names]
    decorator = ast.parse("__import__('support').checked", mode="eval").body
    _import_hook.Typechecker.get_ast = lambda _: decorator
    _import_hook.install_import_hook(names, "support.checked")


def begin_test() -> None:
    """Has the next calls of every function checked."""
    _counts.clear()


def checked(thing: Thing) -> Thing:
    """Decorates a function or a dataclass whose annotations name arrays."""
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__)
        return thing
    if inspect.isgeneratorfunction(thing) or not any(map(_has_array, thing.__annotations__.values())):
        return thing
    strict = jaxtyped(thing, typechecker=_check)

    @functools.wraps(thing)
    def function(*arguments: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling():
            return thing(*arguments, **more)
        count = _counts[thing] = _counts.get(thing, 0) + 1
        return (strict if count <= CALLS else thing)(*arguments, **more)

    return function


def _check(function: Callable) -> Callable:
    function.__annotations__ = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    return _beartype(function)


def _has_array(hint: Any) -> bool:
    return _is_array(hint) or any(map(_has_array, get_args(hint)))


def _is_array(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


def _checkable(hint: Any) -> Any:
    """Returns a hint of arrays and plain values only: `object` stands for all others, which are left to pyright.

    In the tests a stub may stand for a class of spalm; numpy's integers pass for Python's.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is ... or origin is Literal or _is_array(hint) or (inspect.isclass(hint) and hint in _KNOWN):
        return hint
    if hint is None:
        return None
    if hint is int:
        return int | np.integer
    if origin in (Union, UnionType):
        return Union[tuple(map(_checkable, arguments))]  # noqa: UP007
    if origin in _GENERIC:
        return origin[tuple(map(_checkable, arguments))]
    return object
