"""Products of vectors in bfloat16 with sums in single precision: the innermost loop of the join.

A tile is TILE_QUERIES queries times TILE_KEYS keys, and all of its sums are in registers. Where the machine has
AVX512-BF16, one instruction multiplies and adds 32 pairs of numbers; elsewhere the same numbers are widened to single
precision first. numba has no bfloat16, so the loop is written in the language of LLVM.

Two numbers of a vector are one uint32, the first in the lower half. What is multiplied consists of words: such pairs,
or elsewhere single numbers, WORDS of them for a pair. A panel holds TILE_KEYS keys by words: word 0 of every key, then
word 1 of every key, and so on.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from torch import Tensor

_NAMED: str | None = getattr(config, "CPU_FEATURES")  # noqa: B009  # numba sets it when it is imported
_FEATURES = binding.get_host_cpu_features().flatten() if _NAMED is None else _NAMED
"""Instructions for which numba compiles: those of this machine, unless NUMBA_CPU_FEATURES names others."""
HAS_BFLOAT16 = "+avx512bf16" in _FEATURES.split(",")
"""Whether products are computed by instructions for bfloat16."""
WORDS = 1 if HAS_BFLOAT16 else 2
"""Words that are multiplied for a pair of numbers."""
_LANES, TILE_QUERIES = (16, 12) if "+avx512f" in _FEATURES.split(",") else (8, 6)
_VECTORS = 2
TILE_KEYS = _VECTORS * _LANES
"""Queries and keys of a tile: with them, the sums fill most of the machine's registers."""


class _BFloat16Type(ir.types._BaseFloatType):  # pyright: ignore[reportAttributeAccessIssue]
    """LLVM's type of a bfloat16, which llvmlite does not know."""

    def __str__(self) -> str:
        return "bfloat"


_BFloat16Type._create_instance()
_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_F32, _LANES)
_PAIRS = ir.VectorType(_BFloat16Type(), 2 * _LANES)


def _load(builder, address, offset, kind):
    """Loads a value of a type from `offset` bytes behind an address."""
    pointer = builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())
    return builder.load(pointer, align=4)


def _store(builder, value, address, offset):
    """Stores a value `offset` bytes behind an address."""
    builder.store(value, builder.inttoptr(builder.add(address, _I64(offset)), value.type.as_pointer()), align=4)


def _repeated(builder, value, kind):
    """Returns a vector of a value repeated."""
    nothing = ir.Constant(kind, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(nothing, value, _I32(0)), nothing, ir.Constant(_INTS, [0] * _LANES)
    )


def _products_added(builder, totals, query, keys):
    """Returns the sums with the products of a query's word and one word of each key of the panel added."""
    if HAS_BFLOAT16:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        query = builder.bitcast(query, _PAIRS)
        return [builder.call(add, [total, query, builder.bitcast(key, _PAIRS)]) for total, key in zip(totals, keys)]
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{_LANES}f32")
    query = builder.bitcast(query, _FLOATS)
    return [builder.call(add, [query, builder.bitcast(key, _FLOATS), total]) for total, key in zip(totals, keys)]


@intrinsic
def multiply_tile(typing_context, queries, panel, words, begin, bars, scores, masks):
    """Multiplies the queries of a tile with the keys of a panel and tells which scores are above the queries' bars.

    All arguments but the number of `words` are addresses: of TILE_QUERIES queries in uint32, of the panel, of the
    numbers with which the sums of its keys begin, of the queries' bars, and of the results: the scores, a row for each
    query, and for each query an uint32 whose bits tell which of its scores are above its bar.
    """

    def generate(context, builder, signature, arguments):
        queries, panel, words, begin, bars, scores, masks = arguments
        first = [_load(builder, begin, 4 * _LANES * each, _FLOATS) for each in range(_VECTORS)]
        entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(_I64)
        place.add_incoming(_I64(0), entry)
        totals = [[builder.phi(_FLOATS) for _ in first] for _ in range(TILE_QUERIES)]
        at = builder.add(panel, builder.mul(place, _I64(4 * TILE_KEYS)))
        keys = [_load(builder, at, 4 * _LANES * each, _INTS) for each in range(_VECTORS)]
        at, row = builder.add(queries, builder.mul(place, _I64(4))), builder.mul(words, _I64(4))
        sums = []
        for row_totals in totals:
            query = _repeated(builder, _load(builder, at, 0, _I32), _INTS)
            sums.append(_products_added(builder, list(row_totals), query, keys))
            at = builder.add(at, row)
        following = builder.add(place, _I64(1))
        place.add_incoming(following, loop)
        for row_totals, row_sums in zip(totals, sums):
            for total, initial, after in zip(row_totals, first, row_sums):
                total.add_incoming(initial, entry)
                total.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", following, words), loop, end)
        builder.position_at_end(end)
        for number, row_sums in enumerate(sums):
            bar = _repeated(builder, _load(builder, bars, 4 * number, _F32), _FLOATS)
            mask = _I32(0)
            for each, found in enumerate(row_sums):
                _store(builder, found, scores, 4 * (number * TILE_KEYS + each * _LANES))
                above = builder.bitcast(builder.fcmp_ordered(">", found, bar), ir.IntType(_LANES))
                mask = builder.or_(mask, builder.shl(builder.zext(above, _I32), _I32(each * _LANES)))
            _store(builder, mask, masks, 4 * number)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def trailing_zeros(typing_context, number):
    """Returns the place of the lowest bit of an uint32 that is not zero."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uint32(types.uint32), generate


def to_pairs(vectors: Float[Tensor, "n width"]) -> UInt[np.ndarray, "n pairs"]:
    """Returns vectors rounded to bfloat16, two numbers together; a zero follows an odd number of them."""
    even = torch.zeros(len(vectors), -(-vectors.shape[1] // 2) * 2, dtype=torch.bfloat16)
    even[:, : vectors.shape[1]] = vectors
    return even.view(torch.int16).numpy().view("<u4")


def from_pairs(pairs: UInt[np.ndarray, "n pairs"], width: int) -> Float[Tensor, "n width"]:
    """Returns vectors, given as `to_pairs` returns them, in single precision."""
    return torch.from_numpy(np.ascontiguousarray(pairs).view("<i2")).view(torch.bfloat16)[:, :width].float()
