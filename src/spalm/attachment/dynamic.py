"""Dynamic modes: the text's own past is searched too. Their figures are kept apart from static ones.

growing   every earlier position of the text joins the memory as soon as its token is known
cache     only the last positions of the text are searched: the continuous cache of Grave et al. (2017)
"""

import numpy as np
import torch
from jaxtyping import Float, Int

from spalm.neighbours import MISSING
from spalm.semiparametric import Retrieved

_BATCH = 512
"""Number of positions whose neighbours are searched at a time."""


def nearest_in_past(
    keys: Float[np.ndarray, "n width"], tokens: Int[np.ndarray, "n"], count: int, *, reach: int | None = None
) -> Retrieved:
    """Returns the neighbours of each position among the last `reach` positions before it; None: among all."""
    n = len(keys)
    count = min(count, max(1, n))
    vectors, targets = torch.from_numpy(keys.astype(np.float32)), torch.from_numpy(tokens.astype(np.int64))
    squares = (vectors**2).sum(-1)
    found_tokens = torch.zeros(n, count, dtype=torch.long)
    found_distances = torch.full((n, count), torch.inf)
    for start in range(0, n, _BATCH):
        stop = min(n, start + _BATCH)
        first = 0 if reach is None else max(0, start - reach)
        queries, candidates = torch.arange(start, stop)[:, None], torch.arange(first, stop)[None]
        gaps = squares[start:stop, None] - 2 * vectors[start:stop] @ vectors[first:stop].T + squares[None, first:stop]
        gaps = gaps.clamp_min(0).masked_fill(candidates >= queries, torch.inf)
        if reach is not None:
            gaps = gaps.masked_fill(candidates < queries - reach, torch.inf)
        nearest = gaps.topk(min(count, gaps.shape[1]), largest=False)
        columns = nearest.values.shape[1]
        found_distances[start:stop, :columns] = nearest.values
        found_tokens[start:stop, :columns] = targets[first + nearest.indices]
    return Retrieved(found_tokens, found_distances, torch.full((n, count), MISSING))


def merge_nearest(one: Retrieved, other: Retrieved, count: int) -> Retrieved:
    """Returns the nearest neighbours of each position out of two lists, with the exact matches of the first."""
    both = Retrieved(
        torch.cat([one.tokens, other.tokens], -1),
        torch.cat([one.distances, other.distances], -1),
        torch.cat([one.ids, other.ids], -1),
    )
    order = both.distances.argsort(dim=-1, stable=True)[..., :count]
    nearest = both.tokens.gather(-1, order), both.distances.gather(-1, order), both.ids.gather(-1, order)
    return Retrieved(*nearest, matched=one.matched)
