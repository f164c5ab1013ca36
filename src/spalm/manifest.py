"""The form of a manifest. Whatever it says is checked before anything is opened: it may be damaged, or made to harm."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic

from spalm.errors import DamagedError
from spalm.files import is_plain_name

Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 62, strict=True)]
"""A number of things, such as bytes or tokens."""
Size = Annotated[int, pydantic.Field(gt=0, lt=1 << 31, strict=True)]
"""A number of dimensions or of tokens in a vocabulary."""
Digest = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 in hexadecimal."""
ArrayType = Literal["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"]
"""Types of arrays: plain numbers, little-endian."""


def _plain(name: str) -> str:
    """Returns the name of a file in the folder itself; refuses paths."""
    if not is_plain_name(name):
        raise ValueError(f"{name[:100]!r} is not the name of a file in the folder")
    return name


PlainName = Annotated[str, pydantic.AfterValidator(_plain)]
"""Name of a file in the folder of the manifest."""


class Described(dict[str, Any]):
    """A group of values of a manifest. A value that is missing is damage of the file."""

    def __init__(self, values: dict[str, Any], where: Path):
        inner = {key: Described(value, where) if isinstance(value, dict) else value for key, value in values.items()}
        super().__init__(inner)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise DamagedError(
            f"{self._where} is damaged ({key} is missing); remove {self._where.parent} and make it again"
        )


class FileEntry(pydantic.BaseModel):
    """A file: its size and digest and, if it is an array, its type and shape."""

    bytes: Count
    sha256: Digest
    dtype: ArrayType | None = None
    shape: list[Count] | None = None

    @pydantic.model_validator(mode="after")
    def _array_fits(self) -> Self:
        """Refuses an array whose type and shape do not give the size of its file."""
        if (self.dtype is None) != (self.shape is None):
            raise ValueError("a type without a shape, or a shape without a type")
        if self.dtype is not None and self.shape is not None:
            size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
            if size != self.bytes:
                raise ValueError(f"{self.dtype} of shape {self.shape} takes {size:,} bytes, not {self.bytes:,}")
        return self


class Identity(pydantic.BaseModel):
    """What an artifact is: its kind, its version, its settings, and the digests of what it was made from."""

    kind: str
    version: int
    settings: dict[str, Any]
    parents: dict[str, str]


class Manifest(Identity):
    """The description of a finished artifact."""

    digest_before_erasure: Digest | None = None

    facts: dict[str, Any]
    files: dict[PlainName, FileEntry]
