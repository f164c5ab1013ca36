"""Vectors in files of every format, and the obvious way to their nearest neighbours by each metric."""

import struct
from pathlib import Path

import numpy as np


def bfloat16_of(vectors: np.ndarray) -> np.ndarray:
    """Returns the upper halves of float32 numbers, as the void type that numpy gives arrays of bfloat16."""
    return (np.ascontiguousarray(vectors, np.float32).view(np.uint32) >> 16).astype(np.uint16).view("V2")


def write_vectors(path: Path, vectors: np.ndarray) -> Path:
    """Writes vectors in the format that the path's ending names, and returns the path."""
    if path.suffix == ".npy":
        np.save(path, vectors)
    elif path.suffix == ".fvecs":
        rows = np.ascontiguousarray(vectors, "<f4").view("<i4")
        np.hstack([np.full((len(rows), 1), rows.shape[1], "<i4"), rows]).tofile(path)
    else:
        path.write_bytes(struct.pack("<II", *vectors.shape) + np.ascontiguousarray(vectors).tobytes())
    return path


def distance_matrix(queries: np.ndarray, vectors: np.ndarray, metric: str) -> np.ndarray:
    """Returns the distance of each query and each vector, in double precision."""
    a, b = queries.astype(np.float64), vectors.astype(np.float64)
    if metric == "l2":
        return np.sqrt(((a[:, None] - b[None]) ** 2).sum(2))
    if metric == "ip":
        return -(a @ b.T)
    return 1 - (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T


def nearest(distances: np.ndarray, k: int, *, own: bool) -> np.ndarray:
    """Returns the k smallest distances of each row; a vector is not its own neighbour."""
    distances = distances.copy()
    if own:
        np.fill_diagonal(distances, np.inf)
    found = np.sort(distances, axis=1)[:, :k]
    return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=np.inf)
