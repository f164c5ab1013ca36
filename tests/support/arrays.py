"""Keys in an array, and the obvious way to their neighbours."""

import numpy as np

from spalm.neighbours import Exclusion


class Array:
    """What a memory's entries are to a join: keys with ids and documents."""

    def __init__(self, keys: np.ndarray, ids: np.ndarray | None = None, documents: np.ndarray | None = None):
        self._keys = keys.astype(np.float16)
        self._ids = np.arange(len(keys)) if ids is None else ids
        self._documents = self._ids // 50 if documents is None else documents
        self.width = keys.shape[1]

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, start: int, stop: int) -> np.ndarray:
        return self._keys[start:stop]

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self._keys[rows]

    def labels(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def documents(self, start: int, stop: int) -> np.ndarray:
        return self._documents[start:stop]


def brute_force(keys: Array, queries: Array, count: int, exclusion: Exclusion | None) -> np.ndarray:
    """The sorted squared distances of the nearest; with an exclusion, the queries are the keys themselves."""
    theirs, own = (array.keys(0, len(array)).astype(np.float64) for array in (keys, queries))
    found = []
    for number, vector in enumerate(own):
        distances = ((theirs - vector) ** 2).sum(1)
        for row in range(len(keys)):
            if exclusion is not None:
                near = abs(int(keys._ids[row]) - int(queries._ids[number])) <= exclusion.window
                same = exclusion.document and keys._documents[row] == queries._documents[number]
                if near or same:
                    distances[row] = np.inf
        best = np.sort(distances)[:count]
        found.append(np.pad(best, (0, count - len(best)), constant_values=np.inf))
    return np.array(found)


def clustered(count: int, width: int, seed: int, centres: int = 40) -> np.ndarray:
    random = np.random.default_rng(seed)
    places = 3 * random.standard_normal((centres, width))
    return (places[random.integers(0, centres, count)] + random.standard_normal((count, width))).astype(np.float32)
