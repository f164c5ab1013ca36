"""The compiled loop of the join: all visits of queries to partitions, from the products to the lists of the best."""

import numpy as np

from spalm.compute.compiled import compiled
from spalm.neighbours.bfloat16 import TILE_KEYS, TILE_QUERIES, WORDS, multiply_tile, trailing_zeros

_compiled = compiled(fastmath={"nsz", "reassoc", "contract"})
_LINE = 64
"""Bytes of a line of the cache, at which panels begin."""
_PACKED = 2 << 20
"""Bytes of keys that are packed at a time: a partition of vectors that are almost equal may hold very many."""


@_compiled
def _pack(pairs, panels):
    """Writes keys, given as rows of pairs, into panels, and zeros behind the last of them."""
    keys, width = pairs.shape
    for panel in range(panels.shape[0]):
        first = panel * TILE_KEYS
        count = min(TILE_KEYS, keys - first)
        for pair in range(width):
            if WORDS == 1:
                for key in range(count):
                    panels[panel, pair, key] = pairs[first + key, pair]
            else:
                for key in range(count):
                    panels[panel, 2 * pair, key] = pairs[first + key, pair] << np.uint32(16)
                    panels[panel, 2 * pair + 1, key] = pairs[first + key, pair] & np.uint32(0xFFFF0000)
            for key in range(count, TILE_KEYS):
                panels[panel, WORDS * pair : WORDS * (pair + 1), key] = 0


@_compiled
def _relative(vector, centre, out):
    """Writes the words of vector - centre in bfloat16 to `out`, and returns half of its squared length."""
    total = np.float32(0)
    halves = out.view(np.uint16)
    for d in range(len(centre)):
        bits = np.float32(vector[d] - centre[d]).view(np.uint32)
        half = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        whole = np.uint32(half << np.uint32(16))
        if WORDS == 1:
            halves[d] = np.uint16(half)
        else:
            out[d] = whole
        number = whole.view(np.float32)
        total += number * number
    return total / np.float32(2)


@_compiled
def _insert(scores, rows, score, row):
    """Puts a row into a list of the best rows, best first; the last of them falls out."""
    place = len(scores) - 1
    while place > 0 and scores[place - 1] < score:
        scores[place] = scores[place - 1]
        rows[place] = rows[place - 1]
        place -= 1
    scores[place] = score
    rows[place] = row


@_compiled
def visit_partitions(
    vectors,
    query,
    partition,
    centres,
    starts,
    pairs,
    half_norms,
    labels,
    documents,
    own_ids,
    own_documents,
    window,
    by_document,
    scores,
    rows,
):
    """Inserts the keys of visited partitions into the lists of the best rows, unless a query must not find them.

    Visit i is that of vectors[query[i]] to partition[i], which rises. The keys of partition p are the rows from
    starts[p] to starts[p + 1] of `pairs`, in bfloat16 and relative to the partition's centre, with `half_norms`,
    `labels` and `documents`. `own_ids` and `own_documents` are those of the queries. `scores` and `rows` are the lists,
    best first, a row for each query. A score is -|q - k|^2 / 2.
    """
    width, last, most = WORDS * pairs.shape[1], scores.shape[1] - 1, 0
    for i in range(len(partition)):
        most = max(most, starts[partition[i] + 1] - starts[partition[i]])
    most = max(1, min(-(-most // TILE_KEYS), _PACKED // (4 * TILE_KEYS * width)))
    room = np.empty(most * width * TILE_KEYS + _LINE // 4, np.uint32)
    begin = (-room.ctypes.data % _LINE) // 4
    panels = room[begin : begin + most * width * TILE_KEYS].reshape(most, width, TILE_KEYS)
    norms = np.empty(most * TILE_KEYS, np.float32)
    relative = np.zeros((TILE_QUERIES, width), np.uint32)
    halves, bars = np.zeros(TILE_QUERIES, np.float32), np.empty(TILE_QUERIES, np.float32)
    found, masks = np.empty((TILE_QUERIES, TILE_KEYS), np.float32), np.zeros(TILE_QUERIES, np.uint32)
    begin = 0
    while begin < len(query):
        number, end = partition[begin], begin
        while end < len(query) and partition[end] == number:
            end += 1
        for first in range(starts[number], starts[number + 1], most * TILE_KEYS):
            size = min(starts[number + 1] - first, most * TILE_KEYS)
            count = -(-size // TILE_KEYS)
            _pack(pairs[first : first + size], panels[:count])
            for key in range(size):
                norms[key] = -half_norms[first + key]
            norms[size : count * TILE_KEYS] = -np.inf
            for tile in range(begin, end, TILE_QUERIES):
                together = min(TILE_QUERIES, end - tile)
                bars[together:] = np.inf
                for i in range(together):
                    q = query[tile + i]
                    halves[i] = _relative(vectors[q], centres[number], relative[i])
                    bars[i] = scores[q, last] + halves[i]
                for panel in range(count):
                    multiply_tile(  # pyright: ignore[reportCallIssue]  # numba adds the first argument
                        relative.ctypes.data,
                        panels.ctypes.data + panel * width * TILE_KEYS * 4,
                        width,
                        norms.ctypes.data + panel * TILE_KEYS * 4,
                        bars.ctypes.data,
                        found.ctypes.data,
                        masks.ctypes.data,
                    )
                    for i in range(together):
                        mask = masks[i]
                        if mask == 0:
                            continue
                        q = query[tile + i]
                        while mask != 0:
                            j = trailing_zeros(mask)
                            mask &= mask - np.uint32(1)
                            row, score = first + panel * TILE_KEYS + j, found[i, j] - halves[i]
                            if (
                                score > scores[q, last]
                                and abs(labels[row] - own_ids[q]) > window
                                and not (by_document and documents[row] == own_documents[q])
                            ):
                                _insert(scores[q], rows[q], score, row)
                        bars[i] = scores[q, last] + halves[i]
        begin = end
