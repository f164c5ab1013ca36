"""Settings: typed, documented, without unknown keys. Each class of settings is in the module of what it configures."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

import pydantic
import yaml

from spalm.errors import InputError, first_line
from spalm.files import read_text

Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
"""Seed of random numbers."""
_LIMIT = 2**63
"""Integers of settings are smaller than this: libraries hold them in 64 bits."""


def added_since(default: Any, **constraints: Any) -> Any:
    """Returns the field of a setting that earlier versions did not have.

    It is written down only where it differs from its default, so that what earlier versions made is recognised.
    """
    return pydantic.Field(default=default, exclude_if=lambda value: value == default, **constraints)


class Settings(pydantic.BaseModel):
    """A group of settings. A field's docstring is its help text; a key that is not a field is refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @pydantic.field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        """Refuses integers that no library can hold."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not -_LIMIT <= number < _LIMIT:
                raise ValueError("it does not fit 64 bits; give a smaller number")
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Returns settings with these values; the first wrong one becomes a one-line error that begins with `where`."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise InputError(f"{where}: {_first_problem(cls, error)}") from None

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as a JSON value."""
        return self.model_dump(mode="json")


Group = TypeVar("Group", bound=Settings)
_LONGEST_SHOWN = 200
"""Number of characters of a wrong value that a message shows."""
_MOST_YAML, _MOST_NODES = 1 << 20, 100_000
"""Largest number of bytes of a YAML file, and of values in it."""


def _first_problem(cls: type[Settings], error: pydantic.ValidationError) -> str:
    """Returns the first problem that pydantic found, as one line for the user."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(_without_kinds(cls, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; it takes {', '.join(_keys_beside(cls, problem['loc']))}"
    if problem["type"] == "missing":
        return f"{key!r} is missing; add it"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{key} = {_shortened(problem['input'])}: {reason[:1].lower()}{reason[1:]}" if key else reason


def _shortened(value: Any) -> str:
    """Returns a value as it is shown in a message of one line."""
    shown = repr(value)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."


def _keys_beside(cls: type[Settings], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys that would have been right in the place of an unknown one."""
    choices: list[type[Settings]] = [cls]
    for part in location[:-1]:
        inner = [
            _settings_in(choice.model_fields[part].annotation) for choice in choices if part in choice.model_fields
        ]
        # A union of settings puts the chosen kind into the location: that part names no field.
        choices = [found for group in inner for found in group] or choices
    return sorted({name for choice in choices for name in choice.model_fields})


def _without_kinds(cls: type[Settings], location: tuple[int | str, ...]) -> list[str]:
    """Returns the key as a user writes it. In a union of settings, pydantic's location also names the chosen kind."""
    choices, key = [cls], []
    for part in location:
        inner = [each.model_fields[part] for each in choices if part in each.model_fields]
        kinds = {_kind(each) for each in choices if "kind" in each.model_fields}
        if inner or part not in kinds:
            key.append(str(part))
        choices = [found for field in inner for found in _settings_in(field.annotation)] or choices
    return key


def _settings_in(annotation: Any) -> list[type[Settings]]:
    """Returns the classes of settings in a type annotation: one, those of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _settings_in(part)]


def describe_settings(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (key, default, help) of every setting, inner groups included."""
    for name, field in cls.model_fields.items():
        inner = _settings_in(field.annotation)
        if inner and not isinstance(field.default, list):
            for group in inner:
                kind = f"[{_kind(group)}]" if len(inner) > 1 else ""
                yield from describe_settings(group, f"{prefix}{name}{kind}.")
        elif name != "kind" or "[" not in prefix:
            default = "required" if field.is_required() else str(field.default)
            yield f"{prefix}{name}", default, field.description or ""


def _kind(group: type[Settings]) -> str:
    """Returns the value of `kind` that selects this class in a union of settings."""
    return get_args(group.model_fields["kind"].annotation)[0]


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Returns `values` with `key.inner=value` assignments laid over them; the right-hand sides are YAML."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise InputError(f"{assignment!r} is not key=value; for example training.steps=500")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            raise InputError(f"{assignment!r}: {text!r} is not a YAML value; quote it") from None
        values = _assign(values, key.split("."), value, assignment=assignment)
    return values


def read_yaml(path: Path) -> Any:
    """Returns the value in a YAML file; refuses one that is large, or becomes large by references within it."""
    try:
        text = read_text(path, _MOST_YAML, remedy="give a recipe")
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None and _nodes(node, {}) > _MOST_NODES:
            raise InputError(f"{path} refers to its own parts too often; write the values out")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from None
    except (RecursionError, OverflowError):
        raise InputError(f"{path} is nested too deeply, or refers to itself; write the values out") from None
    except InputError:
        raise
    except ValueError as error:  # such as a date with a 13th month
        raise InputError(f"{path} holds a value that is none: {first_line(error)[:300]}") from None


def _nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of values below a node; one that is referred to counts every time."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES  # for a node that contains itself
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_nodes(part, known) for part in inner if isinstance(part, yaml.Node))
    return known[id(node)]


def read_settings(cls: type[Group], assignments: list[str]) -> Group:
    """Returns the defaults, with `key=value` assignments laid over them."""
    return cls.parse(override({}, assignments), "settings")


def _assign(values: Any, path: list[str], value: Any, *, assignment: str) -> dict[str, Any]:
    """Returns `values` with the key at `path`, a path through nested groups, set to `value`."""
    if not isinstance(values, dict):
        raise InputError(f"{assignment!r}: there are no keys inside {values!r}; set the group as a whole")
    first, *rest = path
    return {**values, first: _assign(values.get(first) or {}, rest, value, assignment=assignment) if rest else value}


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Returns the places where two JSON values differ, each as `key: old -> new`.

    A missing key equals a null: a setting that was added later, and is not used, changes nothing.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = list(old) + [name for name in new if name not in old]
        return [
            line
            for name in names
            if old.get(name) != new.get(name)
            for line in differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [f"{key}: {old} -> {new}"]
