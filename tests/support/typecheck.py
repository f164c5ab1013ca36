"""The type checker of the tests: every annotation in spalm, shapes included, is checked when a function is called.

jaxtyping's import hook applies it (`--jaxtyping-packages` in pyproject.toml); outside the tests nothing is checked.
"""

from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it


def checked(function: Callable) -> Callable:
    """Returns a function that checks what it is given and what it returns."""
    function.__annotations__ = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    return _check(function)


def _checkable(hint: Any) -> Any:
    """Returns a hint without what only pyright can check.

    These are protocols (asking an object for all their attributes would compute its properties), and `Self`, which
    beartype knows only in classes that it decorates whole, while jaxtyping decorates functions.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Self or getattr(origin or hint, "_is_protocol", False):
        return object
    if not arguments or origin is Literal or origin is Callable:
        return hint
    known = tuple(map(_checkable, arguments))
    return Union[known] if origin in (Union, UnionType) else origin[known]  # noqa: UP007
