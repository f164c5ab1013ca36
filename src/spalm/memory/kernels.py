"""Compiled loops over entries that are spread over the files of many shards.

A file is given by the address at which it is mapped. Run r holds the rows starts[r] ... ends[r] - 1 of the memory; they
begin at row first[r] of the file at addresses[r].
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spalm.compute.compiled import compiled

_AHEAD = 4
"""Number of keys ahead of the present one that are fetched: they lie anywhere, so each would be waited for."""
_LINE = np.uint64(64)
"""Bytes of a cache line."""
# Half-precision numbers as bits: the magnitude moved into place is the number divided by 2^112.
_MAGNITUDE, _SIGN = np.uint32(0x7FFF), np.uint32(0x8000)
_SCALE = np.float32(2.0**112)


@intrinsic
def pointer(_, address):
    """Returns an address as a pointer."""

    def code(context, builder, signature, arguments):  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code  # pyright: ignore


@intrinsic
def _prefetch(_, address):
    """Has the processor fetch the cache line at an address, and goes on meanwhile."""

    def code(context, builder, signature, arguments):  # noqa: ARG001
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        to_read, keep, data = number(0), number(3), number(1)
        builder.call(function, [pointer, to_read, keep, data])
        return context.get_dummy_value()

    return types.none(address), code  # pyright: ignore


@compiled()
def rows_of(ids, firsts, counts, starts, missing, rows):
    """Fills in the rows of entries by their ids; run r has counts[r] ids from firsts[r] on, and begins at starts[r]."""
    for place in range(len(ids)):
        run = np.searchsorted(firsts, ids[place], side="right") - 1
        rows[place] = missing
        if run >= 0 and ids[place] - firsts[run] < counts[run]:
            rows[place] = starts[run] + ids[place] - firsts[run]


@compiled()
def take_tokens(addresses, starts, ends, first, rows, tokens):
    """Fills in the tokens of any rows."""
    for place in range(len(rows)):
        run = np.searchsorted(ends, rows[place], side="right")
        file = numba.carray(pointer(addresses[run]), first[run] + ends[run] - starts[run], np.int32)  # pyright: ignore
        tokens[place] = file[first[run] + rows[place] - starts[run]]


@compiled()
def tokens_of(ids, firsts, counts, addresses, first, tokens):
    """Fills in the tokens of live entries by their ids and returns the highest; run r has counts[r] ids from firsts[r].

    A negative number in a file, which is damage, becomes a large one.
    """
    highest = np.int64(0)
    for place in range(len(ids)):
        run = np.searchsorted(firsts, ids[place], side="right") - 1
        if run >= 0 and ids[place] - firsts[run] < counts[run]:
            file = numba.carray(pointer(addresses[run]), first[run] + counts[run], np.uint32)  # pyright: ignore
            tokens[place] = file[first[run] + ids[place] - firsts[run]]
            highest = max(highest, tokens[place])
    return highest


@compiled()
def _prefetch_key(addresses, starts, ends, first, row, width):
    """Fetches the key of a row."""
    run = np.searchsorted(ends, row, side="right")
    size = np.uint64(2 * width)
    begin = addresses[run] + np.uint64(first[run] + row - starts[run]) * size
    for offset in range(np.uint64(0), size, _LINE):
        _prefetch(begin + offset)  # pyright: ignore


@compiled(fastmath={"reassoc", "contract"})
def squared_distances(addresses, starts, ends, first, rows, queries, distances):
    """Fills in the squared distance of each query to the keys of its rows; rows below 0 are left out."""
    width = queries.shape[1]
    bits = np.empty(width, np.uint32)
    for query in range(len(rows)):
        wanted = queries[query]
        for place in range(rows.shape[1]):
            row = rows[query, place]
            if place + _AHEAD < rows.shape[1] and rows[query, place + _AHEAD] >= 0:
                _prefetch_key(addresses, starts, ends, first, rows[query, place + _AHEAD], width)
            if row < 0:
                continue
            run = np.searchsorted(ends, row, side="right")
            size = (first[run] + ends[run] - starts[run]) * width
            file = numba.carray(pointer(addresses[run]), size, np.uint16)  # pyright: ignore
            begin = (first[run] + row - starts[run]) * width
            halves = file[begin : begin + width]  # a slice, because only its loops are made of wide instructions
            for i in range(width):
                half = np.uint32(halves[i])
                bits[i] = ((half & _MAGNITUDE) << np.uint32(13)) | ((half & _SIGN) << np.uint32(16))
            key = bits.view(np.float32)
            total = np.float32(0)
            for i in range(width):
                gap = key[i] * _SCALE - wanted[i]
                total += gap * gap
            distances[query, place] = total


@compiled()
def nearest(addresses, starts, ends, first, firsts, counts, proposed, queries, ids, distances):
    """Fills in the nearest of each query's proposed entries, by rising distance and id, each once.

    Rows of `ids` and `distances` that are not filled up stay as they are.
    """
    rows = np.empty(proposed.shape, np.int64)
    rows_of(proposed.reshape(-1), firsts, counts, starts, -1, rows.reshape(-1))
    gaps = np.empty(proposed.shape, np.float32)
    squared_distances(addresses, starts, ends, first, rows, queries, gaps)
    count = ids.shape[1]
    for query in range(len(proposed)):
        found = 0
        for j in range(proposed.shape[1]):
            id, gap = proposed[query, j], gaps[query, j]
            if rows[query, j] < 0:
                continue
            place = found  # the entry goes before all that are farther; candidates come nearly in order
            while place > 0 and (
                distances[query, place - 1] > gap or (distances[query, place - 1] == gap and ids[query, place - 1] > id)
            ):
                place -= 1
            if place == count or (place > 0 and ids[query, place - 1] == id):
                continue
            found = min(found + 1, count)
            for other in range(found - 1, place, -1):
                ids[query, other], distances[query, other] = ids[query, other - 1], distances[query, other - 1]
            ids[query, place], distances[query, place] = id, gap
