"""Types of the fields of requests. Checking them takes little time and memory, whatever a client sends.

A list is checked up to its first wrong item, unknown fields up to the first, and a number fits 64 bits.
"""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from spalm.choices import LARGEST

_SIGNED = 2**63
_T = TypeVar("_T")

NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of things, or a place in a list."""
Integer = Annotated[int, Field(ge=-_SIGNED, lt=_SIGNED)]
"""An integer of 64 bits."""
TokenId = Annotated[int, Field(strict=True, ge=-_SIGNED, lt=_SIGNED)]
"""Number of a token; whether the vocabulary has it is checked later."""
Name = Annotated[str, Field(max_length=1000)]
"""A name, such as that of a model."""
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list, whose check ends with the first wrong item."""
Nothing = Annotated[list[Any], Field(max_length=0, fail_fast=True)]
"""A list of something that is not supported: it must be empty."""


class ClosedForm(BaseModel):
    """A form that refuses unknown fields. An error names the first of them: one for each would take much memory."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {name: value for name, value in given.items() if name in cls.model_fields}
        return known | dict(next(([item] for item in given.items() if item[0] not in known), []))


def _all_zero(biases: dict[str, Any]) -> dict[str, Any]:
    for token, bias in biases.items():
        if bias != 0:
            raise ValueError(f"the bias of token {token[:20]!r} is not 0; biases are not supported")
    return biases


NoBiases = Annotated[dict[str, Any], AfterValidator(_all_zero)]
"""Biases of tokens, which are not supported: all must be 0. They are checked up to the first that is not."""
