"""Data sets: what is read equals what was written, and every broken file is refused by name."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from trlow import data
from trlow.errors import DataError, UsageError

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

DIGITS_FIRST_LABELS = [9, 1, 2, 2, 5, 2, 5, 1, 8, 0, 3, 9]


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">I", 0x0800 | array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def arrays(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    return random.randint(0, 256, (rows, 5, 4)), random.randint(0, 10, rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for images, labels, rows in ((TRAIN_IMAGES, TRAIN_LABELS, 12), (TEST_IMAGES, TEST_LABELS, 7)):
        pictures, classes = arrays(rows, seed=rows)
        (tmp_path / images).write_bytes(idx_bytes(pictures))
        (tmp_path / labels).write_bytes(idx_bytes(classes))
    return tmp_path


def test_idx_files_arrive_as_written(folder):
    train, validation = data.load(f"idx:{folder}")
    for dataset, rows in ((train, 12), (validation, 7)):
        pictures, classes = arrays(rows, seed=rows)
        assert dataset.rows == rows
        assert dataset.shape == (5, 4, 1)
        assert dataset.classes == 10
        assert dataset.features.dtype == np.float32
        expected = pictures.astype(np.float32) / np.float32(255)
        np.testing.assert_array_equal(dataset.features[..., 0], expected)
        np.testing.assert_array_equal(dataset.labels, classes.astype(np.int32))


def test_shape_and_classes_are_those_of_the_files(folder):
    assert data.shape_and_classes(f"idx:{folder}") == ((5, 4, 1), 10)


def test_gzipped_idx_files_give_the_same_arrays(folder):
    plain = data.load_idx(folder)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    for before, after in zip(plain, data.load_idx(folder), strict=True):
        np.testing.assert_array_equal(before.features, after.features)
        np.testing.assert_array_equal(before.labels, after.labels)


@pytest.mark.parametrize("name", [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        data.load_idx(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere is no folder"):
        data.load_idx(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [TRAIN_IMAGES, TRAIN_LABELS])
@pytest.mark.parametrize("kept", [0, 3, 4, 7, -1])
def test_a_truncated_file_is_refused(folder, name, kept):
    path = folder / name
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=f"{name} is truncated"):
        data.load_idx(folder)


@pytest.mark.parametrize("kept", [5, 40, -9])
def test_a_truncated_gzip_stream_is_refused(folder, kept):
    path = folder / TRAIN_IMAGES
    whole = gzip.compress(path.read_bytes())
    path.unlink()
    (folder / f"{TRAIN_IMAGES}.gz").write_bytes(whole[:kept])
    with pytest.raises(DataError, match=f"{TRAIN_IMAGES}.gz"):
        data.load_idx(folder)


def test_a_plain_file_called_gz_is_refused(folder):
    (folder / TRAIN_IMAGES).rename(folder / f"{TRAIN_IMAGES}.gz")
    with pytest.raises(DataError, match="cannot be read"):
        data.load_idx(folder)


def test_trailing_bytes_are_refused(folder):
    path = folder / TEST_LABELS
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"behind the 7 that its sizes \(7,\) ask for"):
        data.load_idx(folder)


@pytest.mark.parametrize("magic", [0, 0x00000801, 0x00000D03, 0x1F8B0800])
def test_a_wrong_magic_number_is_refused(folder, magic):
    path = folder / TRAIN_IMAGES
    path.write_bytes(struct.pack(">I", magic) + path.read_bytes()[4:])
    with pytest.raises(DataError, match=f"0x{magic:08x} instead of 0x00000803"):
        data.load_idx(folder)


def test_a_header_that_promises_terabytes_allocates_nothing(folder):
    path = folder / TRAIN_IMAGES
    path.write_bytes(struct.pack(">IIII", 0x803, 2**32 - 1, 2**15, 2**15))
    with pytest.raises(DataError, match="truncated"):
        data.load_idx(folder)


def test_sizes_of_zero_are_refused(folder):
    (folder / TRAIN_LABELS).write_bytes(struct.pack(">II", 0x801, 0))
    with pytest.raises(DataError, match="at least 1"):
        data.load_idx(folder)


@pytest.mark.parametrize("label", [10, 255])
def test_a_label_out_of_range_is_refused_with_its_row(folder, label):
    path = folder / TRAIN_LABELS
    content = bytearray(path.read_bytes())
    content[8 + 3] = label
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"label {label} of row 3 .* 0 to 9"):
        data.load_idx(folder)


def test_counts_that_differ_are_refused_with_both_files(folder):
    _, classes = arrays(11, seed=1)
    (folder / TRAIN_LABELS).write_bytes(idx_bytes(classes))
    with pytest.raises(DataError, match=f"{TRAIN_IMAGES} holds 12 .*{TRAIN_LABELS} 11"):
        data.load_idx(folder)


def test_pictures_of_two_sizes_are_refused(folder):
    (folder / TEST_IMAGES).write_bytes(idx_bytes(np.zeros((7, 4, 5))))
    with pytest.raises(DataError, match=r"\(5, 4\).*\(4, 5\)"):
        data.load_idx(folder)


@pytest.mark.parametrize("spec", ["", "mnist", "idx", "idx:", "digits:", "IDX:x"])
def test_an_unknown_spec_is_a_usage_error_that_says_what_there_is(spec):
    with pytest.raises(UsageError, match="idx:DIR"):
        data.load(spec)


def test_the_digits_are_split_once_and_for_all():
    pytest.importorskip("sklearn", reason="needs the extra trlow[data]")
    train, validation = data.load("digits")
    assert (train.rows, validation.rows) == (1437, 360)
    assert train.shape == validation.shape == (8, 8, 1)
    assert train.classes == 10
    assert float(train.features.min()) == 0.0
    assert float(train.features.max()) == 1.0
    # Both sides hold every class; and the split is the one that published numbers were made on.
    assert set(np.unique(validation.labels)) == set(range(10))
    assert train.labels[:12].tolist() == DIGITS_FIRST_LABELS
    again, _ = data.load("digits")
    np.testing.assert_array_equal(train.features, again.features)
    assert data.shape_and_classes("digits") == (train.shape, train.classes)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'trlow\[data\]'"):
        data.load_digits()


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.zeros((2, 3, 3), np.float32), np.zeros(2, np.int32), "features are float32"),
        (np.zeros((2, 3, 3, 1)), np.zeros(2, np.int32), "features are float64"),
        (np.zeros((2, 3, 3, 1), np.float32), np.zeros(2, np.int64), "labels are int64"),
        (np.zeros((2, 3, 3, 1), np.float32), np.zeros(3, np.int32), "2 pictures and 3 labels"),
        (np.zeros((0, 3, 3, 1), np.float32), np.zeros(0, np.int32), "hold no row"),
        (np.zeros((1, 3, 3, 1), np.float32), np.full(1, -1, np.int32), "label -1 of row 0"),
    ],
)
def test_arrays_that_do_not_fit_make_no_dataset(features, labels, message):
    with pytest.raises(DataError, match=message):
        data.Dataset("own", features, labels, 10)


def test_arrays_that_fit_make_one():
    features = np.zeros((2, 3, 4, 1), np.float32)
    dataset = data.Dataset("own", features, np.array([0, 9], np.int32), 10)
    assert dataset.rows == 2
    assert dataset.shape == (3, 4, 1)
