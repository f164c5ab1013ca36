"""Checks shapes and types when functions are called, in every module of spalm that annotates arrays with jaxtyping.

Only the tests do that: `install` is called before they import spalm, and jaxtyping's import hook decorates the
functions and dataclasses of those modules with `checked`.
"""

import ast
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, _import_hook, install_import_hook

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it
_KNOWN = {np.ndarray, torch.Tensor, Path, str, bytes, bool, float, NoneType}
_GENERIC = {list, dict, tuple, set}


def install() -> None:
    """Has the modules that annotate arrays checked from now on; they must not have been imported."""
    spec = find_spec("spalm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    files = [path for path in root.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8")]
    names = [".".join(("spalm", *path.relative_to(root).with_suffix("").parts)) for path in files]
    _import_hook.JaxtypingTransformer.visit_FunctionDef = _visit_function
    install_import_hook(names, "support.checked")


_visit = _import_hook.JaxtypingTransformer.visit_FunctionDef


def _visit_function(visitor: _import_hook.JaxtypingTransformer, node: ast.FunctionDef) -> ast.AST:
    """Decorates a function unless it is a generator: `torch.inference_mode` has to see that it is one."""
    own = [child for statement in node.body for child in _outside_of_functions(statement)]
    if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in own):
        visitor.generic_visit(node)
        return node
    return _visit(visitor, node)


def _outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _outside_of_functions(child)


def checked(function: Callable) -> Callable:
    """Returns a function that checks what it is given and what it returns."""
    function.__annotations__ = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    return _check(function)


def _checkable(hint: Any) -> Any:
    """Returns a hint of arrays and plain values only: `object` stands for all others, which are left to pyright.

    In the tests a stub may stand for a class of spalm; numpy's integers pass for Python's.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _KNOWN or hint is ... or origin is Literal:
        return hint
    if hint is int:
        return int | np.integer
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return hint
    if origin in (Union, UnionType):
        return Union[tuple(map(_checkable, arguments))]  # noqa: UP007
    if origin in _GENERIC:
        return origin[tuple(map(_checkable, arguments))]
    return object
