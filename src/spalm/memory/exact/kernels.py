"""Compiled loops that search sorted contexts.

A query is the text before a position, backwards: its last token first, each one higher than its id, ended by BORDER.
"""

import numba
import numpy as np

from spalm.compute.compiled import compiled
from spalm.memory.kernels import pointer


@compiled()
def write_reversed_contexts(tokens, begins, positions, contexts):
    """Fills `contexts` with the query of each position: the tokens before it, back to where its document begins."""
    for row in range(len(positions)):
        for back in range(contexts.shape[1]):
            place = positions[row] - 1 - back
            if place < begins[row]:
                contexts[row, back:] = 0
                break
            contexts[row, back] = tokens[place] + 1


@compiled()
def _number_at(text, place):
    """Returns the number at a place of the text, and a border outside of it: a damaged file may hold any place."""
    return np.int64(text[place]) if 0 <= place < len(text) else np.int64(0)


@compiled()
def _first_at_least(text, suffixes, back, token, low, high):
    """Returns the first of suffixes low ... high - 1 whose token `back` places before its end is `token` or higher."""
    while low < high:
        middle = (low + high) // 2
        if _number_at(text, suffixes[middle] - back) < token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled()
def write_last_contexts(numbers, contexts):
    """Fills `contexts` with the queries of the positions after each of the last tokens; `numbers` are one above ids."""
    for row in range(len(contexts)):
        last = len(numbers) - len(contexts) + row
        for back in range(contexts.shape[1]):
            contexts[row, back] = numbers[last - back] if back <= last else 0


@compiled()
def _arrays(shard, text):
    """Returns the arrays of a shard, of which the address and the length of each are given.

    Another text is given too, because the type of its numbers depends on the vocabulary.
    """
    return (
        numba.carray(pointer(shard[0, 0]), shard[0, 1], text.dtype),  # pyright: ignore
        numba.carray(pointer(shard[1, 0]), shard[1, 1], np.int32),  # pyright: ignore
        numba.carray(pointer(shard[2, 0]), shard[2, 1], np.int64),  # pyright: ignore
        numba.carray(pointer(shard[3, 0]), shard[3, 1], np.int64),  # pyright: ignore
        numba.carray(pointer(shard[4, 0]), shard[4, 1], np.int64),  # pyright: ignore
        numba.carray(pointer(shard[5, 0]), shard[5, 1], np.int64),  # pyright: ignore
    )


@compiled()
def _places_before(first_ids, borders, lengths, first, last):
    """Returns the first place, and the one after the last, of what stands before entries first ... last - 1.

    The end of a document counts if its last entry is among them. The range is empty if they are in none.
    """
    document = np.searchsorted(first_ids, first, side="right") - 1
    if document < 0 or first >= first_ids[document] + lengths[document]:
        return 0, 0
    begin = borders[document] + first - first_ids[document]
    return begin, begin + last - first + (last >= first_ids[document] + lengths[document])


@compiled()
def _count_matches(text, suffixes, starts, query, begin, end, lows, highs, totals, left_out):
    """Finds where the last 1, 2, 3, ... tokens of a query stand, and adds the numbers of places to `totals`.

    The last l + 1 tokens end at suffixes lows[l] ... highs[l] - 1; what does not occur has an empty range. Places begin
    ... end - 1 are to be left out: their numbers are added to `left_out` too.
    """
    longest = len(query)
    low, high, length = 0, 0, 0
    token = np.int64(query[0])
    if 0 < token < len(starts) - 1:
        low, high = starts[token], starts[token + 1]
    while low < high:
        lows[length], highs[length] = low, high
        totals[length] += high - low
        length += 1
        if length == longest:
            break
        token = np.int64(query[length])
        if token == 0:
            break
        if high - low == 1:  # nothing left to divide
            if _number_at(text, suffixes[low] - length) != token:
                break
            continue
        low = _first_at_least(text, suffixes, length, token, low, high)
        high = _first_at_least(text, suffixes, length, token + 1, low, high)
    lows[length:] = 0
    highs[length:] = 0
    for place in range(begin, end):
        back = 0
        while back < length and _number_at(text, place - back) == query[back]:
            left_out[back] += 1
            back += 1


@compiled()
def _take_occurrences(arrays, low, high, begin, end, step, filled, ids, tokens):
    """Adds the entries after some of suffixes low ... high - 1 to `ids` and `tokens`, which hold `filled` already.

    They are divided into parts of `step` suffixes, and of each part the first is taken that can be: what stands at the
    end of a document has no entry after it, and places begin ... end - 1 are left out. Returns the number held then.
    """
    text, suffixes, first_ids, borders, _, starts = arrays
    part = np.float64(low)
    while part < high and filled < len(ids):
        at, part = np.int64(part), part + step
        last = min(high, np.int64(part))
        while at < last:
            place = np.int64(suffixes[at])
            follower = _number_at(text, place + 1)
            if 0 < follower < len(starts) - 1 and not begin <= place < end:
                document = np.searchsorted(borders, place, side="right") - 1
                ids[filled] = first_ids[document] + place - borders[document]
                tokens[filled] = follower - 1
                filled += 1
                break
            at += 1
    return filled


@compiled()
def find_matches(shards, text, queries, first, last, least_counts, missing, lengths, counts, ids, tokens):
    """Finds the matches of queries in all shards together.

    For each of `least_counts` that is the longest match which stands at so many places and which something follows.
    Shards are given by the addresses and lengths of their arrays (see `_arrays`). Query q must not find entries
    first[q] ... last[q] - 1; without these two nothing is left out. Of the places of a match as many are taken as `ids`
    and `tokens` have room for, at equal distances; what is left of these is filled with `missing`.
    """
    longest, wanted = queries.shape[1], ids.shape[2]
    lows, highs = np.empty((len(shards), longest), np.int64), np.empty((len(shards), longest), np.int64)
    begins, ends = np.zeros(len(shards), np.int64), np.zeros(len(shards), np.int64)
    totals, left_out = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for query in range(len(queries)):
        totals[:] = 0
        left_out[:] = 0
        for shard in range(len(shards)):
            held, suffixes, first_ids, borders, sizes, starts = _arrays(shards[shard], text)  # pyright: ignore
            if len(first):
                own = _places_before(first_ids, borders, sizes, first[query], last[query])
                begins[shard], ends[shard] = own
            found = lows[shard], highs[shard], totals, left_out
            _count_matches(held, suffixes, starts, queries[query], begins[shard], ends[shard], *found)
        for level in range(len(least_counts)):
            length = 0
            while length < longest and totals[length] - left_out[length] >= least_counts[level]:
                length += 1
            filled = 0
            while length:
                total = totals[length - 1]
                step = 1.0 if total - left_out[length - 1] <= wanted else total / wanted
                for shard in range(len(shards)):
                    low, high = lows[shard, length - 1], highs[shard, length - 1]
                    if low < high:
                        where = low, high, begins[shard], ends[shard], step
                        taken = filled, ids[query, level], tokens[query, level]
                        filled = _take_occurrences(_arrays(shards[shard], text), *where, *taken)
                if filled:
                    break
                length -= 1  # it stands only at the ends of documents, which tells nothing
            lengths[query, level] = length
            counts[query, level] = totals[length - 1] - left_out[length - 1] if length else 0
            ids[query, level, filled:] = missing
            tokens[query, level, filled:] = missing


@compiled()
def _stands_outside(suffixes, low, high, begins, ends):
    """Returns whether one of suffixes low ... high - 1 is in none of the places begins[i] ... ends[i] - 1."""
    left_out = 0
    for i in range(len(begins)):
        left_out += ends[i] - begins[i]
    if high - low > left_out:
        return True
    for suffix in range(low, high):
        before = np.searchsorted(begins, suffixes[suffix], side="right") - 1
        if before < 0 or suffixes[suffix] >= ends[before]:
            return True
    return False


@compiled()
def _longest_before(text, suffixes, starts, query, first, last, begins, ends):
    """Returns the length of the longest end of query[first:last] that stands in the text, and its range of suffixes."""
    low, high, length = 0, 0, 0
    while first + length < last:
        token = query[last - 1 - length]
        if token <= 0 or token >= len(starts) - 1:
            break
        next_low, next_high = low, high
        if length == 0:
            next_low, next_high = starts[token], starts[token + 1]
        elif high - low == 1:  # nothing left to divide
            next_high -= _number_at(text, suffixes[low] - length) != token
        else:
            next_low = _first_at_least(text, suffixes, length, token, low, high)
            next_high = _first_at_least(text, suffixes, length, token + 1, next_low, high)
        if next_low == next_high or not _stands_outside(suffixes, next_low, next_high, begins, ends):
            break
        low, high, length = next_low, next_high, length + 1
    return length, low, high


@compiled()
def maximal_spans(text, suffixes, starts, query, begins, ends):
    """Returns a row for each span of `query` that stands in the text and cannot be made longer, the last span first.

    `query` is in reading order here. A row is (start, end, low, high): query[start:end] ends at suffixes low ... high
    - 1. Places begins[i] ... ends[i] - 1, which rise, do not count. Spans rise in start and end alike. So, of two that
    follow each other, the earlier one ends where the token before the later one, and what comes after it, stops
    standing in the text: that end is found by bisection.
    """
    found = np.empty((len(query), 4), np.int64)
    count, end = 0, len(query)
    while end > 0:
        length, low, high = _longest_before(text, suffixes, starts, query, 0, end, begins, ends)
        if length == 0:
            end -= 1
            continue
        start = end - length
        found[count, 0], found[count, 1], found[count, 2], found[count, 3] = start, end, low, high
        count += 1
        before = start - 1
        stands, fails = before, end  # query[before:stands] stands in the text, query[before:fails] does not
        while fails - stands > 1:
            middle = (stands + fails) // 2
            length, _, _ = _longest_before(text, suffixes, starts, query, before, middle, begins, ends)
            if length == middle - before:
                stands = middle
            else:
                fails = middle
        end = stands
    return found[:count]
