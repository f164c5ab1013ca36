"""Compiled loops that search sorted contexts.

A query is the text before a position, backwards: its last token first, each one higher than its id, ended by BORDER.
"""

import numpy as np

from spalm.compute.compiled import compiled


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
def count_matches(text, suffixes, starts, queries, begins, ends, lows, highs, totals, left_out):
    """Finds where the last 1, 2, 3, ... tokens of each query stand, and adds the numbers of places to `totals`.

    The last l + 1 tokens of query q end at suffixes lows[q, l] ... highs[q, l] - 1; what does not occur has an empty
    range. Places begins[q] ... ends[q] - 1 are to be left out: their numbers are added to `left_out` too.
    """
    longest = queries.shape[1]
    for query in range(len(queries)):
        low, high, length = 0, 0, 0
        token = np.int64(queries[query, 0])
        if 0 < token < len(starts) - 1:
            low, high = starts[token], starts[token + 1]
        while low < high:
            lows[query, length], highs[query, length] = low, high
            totals[query, length] += high - low
            length += 1
            if length == longest:
                break
            token = np.int64(queries[query, length])
            if token == 0:
                break
            if high - low == 1:  # nothing left to divide
                if _number_at(text, suffixes[low] - length) != token:
                    break
                continue
            low = _first_at_least(text, suffixes, length, token, low, high)
            high = _first_at_least(text, suffixes, length, token + 1, low, high)
        for rest in range(length, longest):
            lows[query, rest] = highs[query, rest] = 0
        for place in range(begins[query], ends[query]):
            back = 0
            while back < length and _number_at(text, place - back) == queries[query, back]:
                left_out[query, back] += 1
                back += 1


@compiled()
def choose_lengths(totals, left_out, least_counts, lengths):
    """Sets lengths[q, i] to the length of the longest match of query q that stands at least_counts[i] places."""
    for query in range(len(totals)):
        for level in range(len(least_counts)):
            length = 0
            while length < totals.shape[1]:
                if totals[query, length] - left_out[query, length] < least_counts[level]:
                    break
                length += 1
            lengths[query, level] = length


@compiled()
def shorten_matches(totals, left_out, filled, lengths, counts, still_open):
    """Shortens by a token each match that nothing follows, and counts all matches.

    Sets still_open[q, i] for those that were shortened, and returns whether there are any.
    """
    any_open = False
    for query in range(len(lengths)):
        for level in range(lengths.shape[1]):
            shortened = filled[query, level] == 0 and lengths[query, level] > 0
            lengths[query, level] -= shortened
            length = lengths[query, level]
            still_open[query, level] = shortened and length > 0
            any_open = any_open or still_open[query, level]
            counts[query, level] = totals[query, length - 1] - left_out[query, length - 1] if length else 0
    return any_open


@compiled()
def take_occurrences(
    text,
    suffixes,
    first_ids,
    borders,
    lows,
    highs,
    begins,
    ends,
    lengths,
    totals,
    left_out,
    still_open,
    filled,
    ids,
    tokens,
):
    """Adds the entries after some occurrences of the matches in one shard to `ids` and `tokens`.

    More than are wanted are divided into as many equal parts, and of each part the first is taken that can be;
    filled[q, i] is the number of those taken so far of a match of length lengths[q, i]. Only matches with
    still_open[q, i] are looked at. What stands at the end of a document has no entry after it, and places begins[q] ...
    ends[q] - 1 are left out.
    """
    wanted = ids.shape[2]
    for query in range(len(lengths)):
        for level in range(lengths.shape[1]):
            length = lengths[query, level]
            if length == 0 or not still_open[query, level]:
                continue
            high = highs[query, length - 1]
            total = totals[query, length - 1]
            step = 1.0 if total - left_out[query, length - 1] <= wanted else total / wanted
            part = np.float64(lows[query, length - 1])
            while part < high and filled[query, level] < wanted:
                at, part = np.int64(part), part + step
                place = np.int64(suffixes[at])
                end = min(high, np.int64(part))
                while _number_at(text, place + 1) == 0 or begins[query] <= place < ends[query]:
                    at += 1
                    if at >= end:
                        break
                    place = np.int64(suffixes[at])
                if at >= end:
                    continue
                document = np.searchsorted(borders, place, side="right") - 1
                ids[query, level, filled[query, level]] = first_ids[document] + place - borders[document]
                tokens[query, level, filled[query, level]] = _number_at(text, place + 1) - 1
                filled[query, level] += 1


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
