"""Compiled loops over scores.

Each loop reads a score once, while it is in the cache; array operations would pass over it several times. The loops
release Python's lock, so that threads run side by side.

A score is q.k - |k|^2 / 2: it falls as the distance of query q and key k grows.
"""

import numpy as np

from spalm.compute.compiled import compiled
from spalm.memory import MISSING

_TILE = 64
"""Number of scores that are compared with a query's lowest kept score together: most tiles have none above it."""


# Not all of fastmath: scores may be infinite, so the compiler must not assume that they are finite.
_compiled = compiled(fastmath={"nnan", "nsz", "reassoc", "contract"})


@_compiled
def _any_above(products, half_norms, bar):
    """Returns whether any score of a tile is above `bar`."""
    found = np.int32(0)
    for j in range(len(products)):
        found |= np.int32(products[j] - half_norms[j] > bar)
    return found


@_compiled
def update_topk(
    products, half_norms, first, labels, documents, query, own_ids, own_documents, window, by_document, scores, rows
):
    """Inserts keys into the lists of the best rows of queries, unless a query must not find them.

    `products[i, j]` is the product of query number query[i] and the key in row first + j, whose half squared norm,
    label and document are half_norms[j], labels[j] and documents[j]. `own_ids` and `own_documents` are the queries'
    ids and documents. `scores` and `rows` are the lists, best first, a row for each query.
    """
    queries, size = products.shape
    last = scores.shape[1] - 1
    for i in range(queries):
        q = query[i]
        bar = scores[q, last]
        for begin in range(0, size, _TILE):
            end = min(begin + _TILE, size)
            if not _any_above(products[i, begin:end], half_norms[begin:end], bar):
                continue
            for j in range(begin, end):
                score = products[i, j] - half_norms[j]
                if (
                    score <= bar
                    or abs(labels[j] - own_ids[q]) <= window
                    or (by_document and documents[j] == own_documents[q])
                ):
                    continue
                place = last
                while place > 0 and scores[q, place - 1] < score:
                    scores[q, place] = scores[q, place - 1]
                    rows[q, place] = rows[q, place - 1]
                    place -= 1
                scores[q, place] = score
                rows[q, place] = first + j
                bar = scores[q, last]


_TO_SINGLE = np.float32(2.0**112)
"""Factor between the exponents of half and single precision."""


@_compiled
def _squared_gap(half, vector):
    """Returns the squared distance of a float16 vector, given by its bits, and a float32 vector."""
    total = np.float32(0)
    for d in range(len(vector)):
        bits = np.int32(half[d])
        number = np.int32(((bits & 0x7FFF) << 13) | ((bits & 0x8000) << 16)).view(np.float32) * _TO_SINGLE
        total += (number - vector[d]) ** 2
    return total


@_compiled
def distances_to_rows(halves, rows, vectors, out):
    """Writes the squared distance of vector i and row rows[i, j] of `halves` to out[i, j]; infinity for MISSING.

    `halves` is float16, given by its bits.
    """
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            out[i, j] = np.inf if rows[i, j] == MISSING else _squared_gap(halves[rows[i, j]], vectors[i])


@_compiled
def _squared_single_gap(single, vector):
    """Returns the squared distance of two float32 vectors."""
    total = np.float32(0)
    for d in range(len(vector)):
        total += (single[d] - vector[d]) ** 2
    return total


@_compiled
def distances_to_single_rows(singles, rows, vectors, out):
    """Does what `distances_to_rows` does, for rows of float32."""
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            out[i, j] = np.inf if rows[i, j] == MISSING else _squared_single_gap(singles[rows[i, j]], vectors[i])


@_compiled
def borders_within(margins, limits, near, first):
    """Returns (query, partition, margin) of every border within the limit of its query.

    Queries are numbered from `first` on; `near` are the partitions behind the borders.
    """
    queries, borders = margins.shape
    count = 0
    for i in range(queries):
        for j in range(borders):
            count += margins[i, j] <= limits[i]
    query, partition, margin = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.float32)
    count = 0
    for i in range(queries):
        for j in range(borders):
            if margins[i, j] <= limits[i]:
                query[count], partition[count], margin[count] = first + i, near[j], margins[i, j]
                count += 1
    return query, partition, margin


@_compiled
def hash_rows(numbers, factors, out):
    """Writes a hash of each row, which is the same for rows of the same bits: the sum of its bits times `factors`."""
    for i in range(numbers.shape[0]):
        total = np.uint64(0)
        for j in range(numbers.shape[1]):
            total += np.uint64(numbers[i, j]) * factors[j]
        out[i] = total


@_compiled
def spread_to_copies(found, squared, nearest, starts, members, ids, gaps):
    """Writes the neighbours of rows, by distinct vectors found[i] and their squared distances, nearest first.

    Distinct vector v stands for members[starts[v] : starts[v + 1]]. Those of nearest[i] come first, at a distance of 0,
    unless it is MISSING. The lists `ids` and `gaps` end when they are full.
    """
    for i in range(len(ids)):
        count = 0
        for j in range(-1, found.shape[1]):
            vector = nearest[i] if j < 0 else found[i, j]
            if vector == MISSING or (j >= 0 and vector == nearest[i]):
                continue
            for place in range(starts[vector], starts[vector + 1]):
                if count == ids.shape[1]:
                    break
                ids[i, count] = members[place]
                gaps[i, count] = np.float32(0) if j < 0 else squared[i, j]
                count += 1


@_compiled
def counting_sort_order(numbers, count):
    """Returns the order that sorts numbers below `count` and keeps equal ones in their order."""
    places = np.zeros(count + 1, np.int64)
    for number in numbers:
        places[number + 1] += 1
    places = np.cumsum(places)
    order = np.empty(len(numbers), np.int64)
    for i in range(len(numbers)):
        order[places[numbers[i]]] = i
        places[numbers[i]] += 1
    return order
