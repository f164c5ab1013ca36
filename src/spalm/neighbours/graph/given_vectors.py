"""Vectors as they are given: an array, or a file that is mapped and whose header is checked before anything is read.

    .npy       numpy's format; |V2, as which numpy stores bfloat16, is bfloat16
    .fbin      uint32 count, uint32 width, then the rows in float32; .f16bin, .bf16bin, .i8bin and .u8bin are the same
               in float16, bfloat16, int8 and uint8
    .fvecs     each row: int32 width, then float32

All of them are little-endian, but for .npy, which says what it is.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int

from spalm.compute import SentByFields
from spalm.errors import DamagedError, InputError
from spalm.files import open_regular, refuse_hole
from spalm.neighbours.scratch_files import release
from spalm.paths import user_path

VectorInput = np.ndarray | torch.Tensor | Path | str
"""Vectors as a caller gives them: an array or tensor of one row each, or the path of a file."""
_BFLOAT16 = "bfloat16"
_KINDS = {"<f4": "float32", "<f2": "float16", "<f8": "float64", "|i1": "int8", "|u1": "uint8", _BFLOAT16: _BFLOAT16}
"""Types of numbers that are read, and their names."""
_BIN = {".fbin": "<f4", ".f16bin": "<f2", ".bf16bin": _BFLOAT16, ".i8bin": "|i1", ".u8bin": "|u1"}
"""Types of numbers of files that begin with a count and a width."""
_ROOM = 16 << 20
"""Bytes of a mapped file that may be in RAM before its pages are released."""


_AROUND = 64 << 10
"""Bytes around a row that the system maps with it, if it has them in its cache."""


@dataclass(frozen=True)
class MappedRows(SentByFields):
    """Rows in a file."""

    path: Path
    """Path of the file."""
    dtype: str
    """Type of the numbers, as they are mapped."""
    shape: tuple[int, int]
    """Number of rows, and of numbers of a row with those before its vector."""
    offset: int
    """Bytes before the first row."""
    by_columns: bool = False
    """Whether a column is contiguous instead of a row."""

    @property
    def size(self) -> int:
        """Bytes that the file must have."""
        return self.offset + math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def open(self) -> np.ndarray:
        """Maps the rows."""
        order = "F" if self.by_columns else "C"
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)


@dataclass(frozen=True)
class GivenVectors(SentByFields):
    """Vectors as they are given, of one of the types of `_KINDS`."""

    name: str
    """Name of the vectors in messages: the path of the file, or what an array is used for."""
    rows: np.ndarray | MappedRows
    """The vectors; bfloat16 as uint16."""
    kind: str
    """Type of the numbers."""
    prefix: int = 0
    """Numbers before the vector in each row, of which the first is the width."""

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def width(self) -> int:
        """Dimensions of a vector."""
        return self.rows.shape[1] - self.prefix

    @property
    def is_half(self) -> bool:
        """Whether half precision holds the numbers."""
        return self.kind in ("<f2", "|i1", "|u1")

    @cached_property
    def _opened(self) -> np.ndarray:
        return self.rows.open() if isinstance(self.rows, MappedRows) else self.rows

    @cached_property
    def _touched(self) -> list[int]:
        """Bytes that were read since the pages were released, as the only number of a list."""
        return [0]

    def read(self, first: int, last: int) -> np.ndarray:
        """Returns the vectors [first, last) as a copy: float32, or float16 where they are float16 or 8 bits."""
        return self._converted(self._opened[first:last], first)

    def take(self, rows: Int[np.ndarray, "n"]) -> np.ndarray:
        """Returns the vectors in any rows, as `read` does."""
        found = self._converted(self._opened[rows], None)
        self._release(_AROUND * len(rows))
        return found

    def _converted(self, rows: np.ndarray, first: int | None) -> np.ndarray:
        """Returns rows as numbers; `first` is the number of the first where they are consecutive."""
        if self.prefix:
            wrong = np.flatnonzero(rows[:, 0] != self.width)
            if len(wrong):
                where = "a row" if first is None else f"row {first + int(wrong[0]):,}"
                raise DamagedError(
                    f"{self.name} is damaged ({where} has a width of {int(rows[wrong[0], 0]):,}, the first one of "
                    f"{self.width:,}); write it again"
                )
            rows = rows[:, self.prefix :].view("<f4")
        if self.kind == _BFLOAT16:
            numbers = (rows.astype(np.uint32) << 16).view(np.float32)
        else:
            with np.errstate(over="ignore"):  # what does not fit is refused as infinite
                numbers = rows.astype(np.float16 if self.is_half else np.float32)
        self._release(rows.nbytes)
        return numbers

    def _release(self, size: int) -> None:
        """Counts bytes that were read, and releases the mapped pages once they may have become too many.

        Pages of an array that its owner may have changed without changing the file (mode "c") stay.
        """
        self._touched[0] += size
        if self._touched[0] > _ROOM and getattr(self._opened, "mode", None) in ("r", "r+"):
            release(self._opened)
            self._touched[0] = 0


def open_vectors(vectors: VectorInput, name: str) -> GivenVectors:
    """Returns vectors ready to be read; `name` is what messages call an array."""
    if isinstance(vectors, str | Path):
        path = user_path(vectors)
        found = _file_reader(path)(path)
        if isinstance(found.rows, MappedRows):
            _check_size(path, found.rows.size)
    else:
        found = _of_array(vectors.detach().cpu() if isinstance(vectors, torch.Tensor) else vectors, name)
    if found.width == 0 or not len(found):
        raise InputError(f"{found.name}: there are no vectors ({len(found):,} x {found.width:,}); give some")
    return found


def _of_array(array: np.ndarray | torch.Tensor, name: str) -> GivenVectors:
    """Returns the vectors in an array or tensor."""
    if isinstance(array, torch.Tensor):
        if array.dtype == torch.bfloat16:
            array = array.contiguous().view(torch.int16).numpy().view(np.uint16).view("V2")
        else:
            array = array.numpy()
    kind = _kind_of(array.dtype, name)
    _matrix_shape(array.shape, name)
    return GivenVectors(name, array.view(np.uint16) if kind == _BFLOAT16 else array, kind)


def _kind_of(dtype: np.dtype, name: str) -> str:
    """Returns which of `_KINDS` a type is."""
    if dtype.itemsize == 2 and dtype.names is None and (dtype.name == _BFLOAT16 or dtype.str[1:] == "V2"):
        return _BFLOAT16
    kind = dtype.newbyteorder("<").str if dtype.kind in "fiu" else ""
    if kind not in _KINDS:
        also = "; bfloat16 is array.view(ml_dtypes.bfloat16)" if kind == "<u2" else ""
        raise InputError(f"{name}: numbers of type {dtype}; give {', '.join(_KINDS.values())}{also}")
    return kind


def _matrix_shape(shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """Returns the shape of an array; refuses one that is not that of rows of vectors."""
    if len(shape) != 2:
        raise InputError(f"{name}: an array of shape {shape}; give one of two dimensions, a row for each vector")
    return shape[0], shape[1]


def _file_reader(path: Path) -> Callable[[Path], GivenVectors]:
    """Returns the function that reads the header of this kind of file."""
    readers = {".npy": _npy, ".fvecs": _fvecs, **dict.fromkeys(_BIN, _bin)}
    if path.suffix not in readers:
        raise InputError(f"{path}: the kind of file is not known by its name; give {', '.join(readers)}")
    return readers[path.suffix]


def _npy(path: Path) -> GivenVectors:
    """Reads the header of a .npy file; nothing in it is carried out."""
    with open_regular(path) as file:
        try:
            versions = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, by_columns, dtype = versions[np.lib.format.read_magic(file)](file)
            offset = file.tell()
        except (ValueError, KeyError, TypeError, SyntaxError, EOFError, RecursionError, MemoryError):
            raise DamagedError(f"{path} is not a .npy file of an array of numbers; write it with numpy.save") from None
    kind = _kind_of(dtype, str(path))
    shape = _matrix_shape(shape, str(path))
    if min(shape) < 0 or max(shape) >= 1 << 48:
        raise DamagedError(f"{path} is damaged (an array of shape {shape}); write it again")
    mapped = MappedRows(path, "<u2" if kind == _BFLOAT16 else dtype.str, shape, offset, by_columns=by_columns)
    return GivenVectors(str(path), mapped, kind)


def _bin(path: Path) -> GivenVectors:
    """Reads the header of a file that begins with a count and a width."""
    kind = _BIN[path.suffix]
    shape = struct.unpack("<II", _head(path, 8))
    return GivenVectors(str(path), MappedRows(path, "<u2" if kind == _BFLOAT16 else kind, shape, 8), kind)


def _fvecs(path: Path) -> GivenVectors:
    """Reads the first width of a .fvecs file."""
    (width,) = struct.unpack("<i", _head(path, 4))
    if width <= 0:
        raise DamagedError(f"{path} is damaged (a width of {width:,}); write it again")
    mapped = MappedRows(path, "<i4", (path.stat().st_size // (4 + 4 * width), 1 + width), 0)
    return GivenVectors(str(path), mapped, "<f4", prefix=1)


def _head(path: Path, size: int) -> bytes:
    """Returns the first bytes of a file."""
    with open_regular(path) as file:
        head = file.read(size)
    if len(head) < size:
        raise DamagedError(f"{path} is damaged ({len(head)} bytes); write it again")
    return head


def _check_size(path: Path, size: int) -> None:
    """Raises an error unless a file has the size that follows from its header, and more of it than a hole."""
    found = path.stat().st_size
    if found != size:
        raise DamagedError(
            f"{path} is damaged (its header stands for {size:,} bytes, and it has {found:,}); write it again"
        )
    refuse_hole(path)
