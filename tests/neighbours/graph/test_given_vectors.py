"""Given vectors: every format is read as it was written, and what is wrong with one is said in one line."""

import struct

import numpy as np
import pytest
import torch

from spalm import InputError, knn_graph
from spalm.neighbours.graph import given_vectors as module
from spalm.neighbours.graph.given_vectors import open_vectors
from support.arrays import clustered
from support.vector_files import bfloat16_of, write_vectors

VECTORS = clustered(23, 7, 0)
SMALL = (VECTORS * 9).astype(np.int8)


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("a.npy", VECTORS, VECTORS),
        ("a.npy", VECTORS.astype(np.float16), VECTORS.astype(np.float16)),
        ("a.npy", VECTORS.astype(np.float64), VECTORS),
        ("a.npy", VECTORS.astype(">f4"), VECTORS),
        ("a.npy", np.asfortranarray(VECTORS), VECTORS),
        ("a.npy", SMALL, SMALL),
        ("a.npy", SMALL.view(np.uint8), SMALL.view(np.uint8)),
        ("a.npy", bfloat16_of(VECTORS), torch.from_numpy(VECTORS).bfloat16()),
        ("a.fvecs", VECTORS, VECTORS),
        ("a.fbin", VECTORS, VECTORS),
        ("a.f16bin", VECTORS.astype(np.float16), VECTORS.astype(np.float16)),
        ("a.bf16bin", bfloat16_of(VECTORS), torch.from_numpy(VECTORS).bfloat16()),
        ("a.i8bin", SMALL, SMALL),
        ("a.u8bin", SMALL.view(np.uint8), SMALL.view(np.uint8)),
    ],
)
def test_every_format_is_read(tmp_path, monkeypatch, name, written, expected):
    monkeypatch.setattr(module, "_ROOM", 100)
    if isinstance(expected, torch.Tensor):  # torch rounds to the nearest bfloat16, cutting does not
        expected = (bfloat16_of(VECTORS).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    for given in (open_vectors(write_vectors(tmp_path / name, written), "v"), open_vectors(written, "v")):
        assert (len(given), given.width) == expected.shape
        np.testing.assert_array_equal(given.read(0, 23), expected)
        np.testing.assert_array_equal(given.read(5, 9), expected[5:9])
        np.testing.assert_array_equal(given.take(np.array([7, 0, 7])), expected[[7, 0, 7]])


def test_tensors_are_read():
    tensor = torch.from_numpy(VECTORS)
    np.testing.assert_array_equal(open_vectors(tensor, "v").read(0, 23), VECTORS)
    half = open_vectors(tensor.bfloat16()[::2], "v").read(0, 12)
    np.testing.assert_array_equal(half, tensor.bfloat16()[::2].float().numpy())


def test_pages_of_mapped_files_are_released(tmp_path, monkeypatch):
    path = write_vectors(tmp_path / "a.npy", VECTORS)
    released = []
    monkeypatch.setattr(module, "_ROOM", 7 * 4 * 3)
    monkeypatch.setattr(module, "release", released.append)
    for vectors, times in ((path, 5), (np.load(path, mmap_mode="r"), 5), (np.load(path, mmap_mode="c"), 0)):
        given, before = open_vectors(vectors, "v"), len(released)
        for first in range(0, 20):
            given.read(first, first + 1)
        assert len(released) - before == times


def damaged(path, *, count=23, width=7, numbers=23 * 7):
    path.write_bytes(struct.pack("<II", count, width) + bytes(4 * numbers))
    return path


@pytest.mark.parametrize(
    ("count", "width", "numbers", "message"),
    [
        (23, 7, 23 * 7 - 1, "its header stands for 652 bytes, and it has 648"),
        (24, 7, 23 * 7, "its header stands for"),
        (2**32 - 1, 2**32 - 1, 4, "its header stands for"),
        (0, 7, 0, "there are no vectors"),
        (7, 0, 0, "there are no vectors"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, count, width, numbers, message):
    path = damaged(tmp_path / "a.fbin", count=count, width=width, numbers=numbers)
    with pytest.raises(InputError, match=message):
        open_vectors(path, "v")


def test_damaged_files_are_refused(tmp_path):
    whole = write_vectors(tmp_path / "a.npy", VECTORS).read_bytes()
    for content in (
        b"",
        whole[:40],
        whole[:-1],
        whole + b"1",
        b"PK" + whole[2:],
        whole.replace(b"<f4", b"|O8"),
        b"\x93NUMPY\x09\x00",
    ):
        (tmp_path / "b.npy").write_bytes(content)
        with pytest.raises(InputError, match=r"b\.npy"):
            open_vectors(tmp_path / "b.npy", "v")
    rows = write_vectors(tmp_path / "a.fvecs", VECTORS).read_bytes()
    (tmp_path / "b.fvecs").write_bytes(rows[: 32 * 5] + struct.pack("<i", 6) + rows[32 * 5 + 4 :])
    with pytest.raises(InputError, match="row 5 has a width of 6, the first one of 7"):
        open_vectors(tmp_path / "b.fvecs", "v").read(0, 23)
    for content in (b"", struct.pack("<i", -1) + rows[4:], rows[:-1]):
        (tmp_path / "b.fvecs").write_bytes(content)
        with pytest.raises(InputError, match="damaged"):
            open_vectors(tmp_path / "b.fvecs", "v")
    (tmp_path / "b.txt").write_text("1 2 3")
    with pytest.raises(InputError, match="not known by its name"):
        open_vectors(tmp_path / "b.txt", "v")
    (tmp_path / "c.npy").mkdir()
    with pytest.raises(InputError, match="not a regular file"):
        open_vectors(tmp_path / "c.npy", "v")
    with (tmp_path / "d.fbin").open("wb") as file:
        file.write(struct.pack("<II", 1 << 20, 1 << 10))
        file.truncate(8 + (1 << 32))
    with pytest.raises(InputError, match="hardly any"):
        open_vectors(tmp_path / "d.fbin", "v")


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (VECTORS[0], r"an array of shape \(7,\)"),
        (VECTORS[None], r"an array of shape \(1, 23, 7\)"),
        (VECTORS[:0], "there are no vectors"),
        (VECTORS[:, :0], "there are no vectors"),
        (VECTORS.astype(int), "numbers of type int64; give float32"),
        (VECTORS.astype(np.uint16), "numbers of type uint16.*ml_dtypes"),
        (VECTORS.astype(complex), "numbers of type complex128"),
        (VECTORS > 0, "numbers of type bool"),
        (VECTORS.astype(object), "numbers of type object"),
        (VECTORS.astype(str), "numbers of type <U"),
    ],
)
def test_arrays_that_are_no_vectors_are_refused(vectors, message):
    with pytest.raises(InputError, match=message) as found:
        knn_graph(vectors)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_numbers_that_are_not_finite_are_refused(wrong, dtype):
    vectors = VECTORS.astype(dtype)
    vectors[11, 3] = wrong
    with pytest.raises(InputError, match="vectors: row 11 holds a number that is not finite"):
        knn_graph(vectors)
    with pytest.raises(InputError, match="queries: row 11 holds a number that is not finite"):
        knn_graph(VECTORS, queries=vectors)


@pytest.mark.parametrize("name", ["a.npy", "a.fvecs", "a.fbin", "a.f16bin", "a.bf16bin"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_files_with_numbers_that_are_not_finite_are_refused(tmp_path, name, wrong):
    vectors = VECTORS.copy()
    vectors[11, 3] = wrong
    kinds = {"a.f16bin": vectors.astype(np.float16), "a.bf16bin": bfloat16_of(vectors)}
    path = write_vectors(tmp_path / name, kinds.get(name, vectors))
    with pytest.raises(InputError, match=rf"{name}: row 11 holds a number that is not finite") as found:
        knn_graph(path)
    assert "\n" not in str(found.value)


def test_a_number_too_large_for_single_precision_is_refused():
    vectors = VECTORS.astype(np.float64)
    vectors[3, 0] = 1e39
    with pytest.raises(InputError, match="row 3 holds a number that is not finite in single precision"):
        knn_graph(vectors)
