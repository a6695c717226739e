"""Labelled pictures as two arrays, from scikit-learn's digits or from MNIST's four files.

Nothing is downloaded. Everything a file claims is compared with what it holds before an array is
made of it, so a `Dataset` that exists is sound: as many labels as pictures, every label a class.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from trlow.errors import DataError

DIGITS_SHAPE = (8, 8, 1)
DIGITS_CLASSES = 10
DIGITS_TRAIN_ROWS = 1437
DIGITS_VALIDATION_ROWS = 360
# The split is part of every published number, so it has a seed of its own: changing a run's seed
# must not move a row from one side to the other.
DIGITS_SPLIT_SEED = 20_240_229

IDX_CLASSES = 10
IDX_IMAGES_MAGIC = 0x00000803  # unsigned bytes in 3 dimensions: rows, height, width
IDX_LABELS_MAGIC = 0x00000801  # unsigned bytes in 1 dimension: rows


@dataclass(frozen=True, slots=True)
class Dataset:
    """Pictures and their labels.

    Raises `DataError` when the arrays do not fit each other.
    """

    name: str
    features: npt.NDArray[np.float32]  # (rows, height, width, channels), scaled to [0, 1]
    labels: npt.NDArray[np.int32]  # (rows,), each in [0, classes)
    classes: int

    def __post_init__(self) -> None:
        """Check shapes, types and the range of the labels."""
        if self.features.ndim != 4 or self.features.dtype != np.float32:
            raise DataError(
                f"{self.name}: features are {self.features.dtype}{self.features.shape}; "
                "give float32 of the shape (rows, height, width, channels)"
            )
        if self.labels.ndim != 1 or self.labels.dtype != np.int32:
            raise DataError(
                f"{self.name}: labels are {self.labels.dtype}{self.labels.shape}; "
                "give int32 of the shape (rows,)"
            )
        if 0 in self.features.shape:
            raise DataError(f"{self.name}: features of the shape {self.features.shape} hold no row")
        if len(self.features) != len(self.labels):
            raise DataError(
                f"{self.name}: {len(self.features)} pictures and {len(self.labels)} labels; "
                "give one label per picture"
            )
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= self.classes))
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"{self.name}: label {self.labels[row]} of row {row} is out of range; "
                f"there are {self.classes} classes, so labels go from 0 to {self.classes - 1}"
            )

    @property
    def rows(self) -> int:
        """How many pictures there are."""
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of one picture."""
        _, height, width, channels = self.features.shape
        return height, width, channels


def load(spec: str) -> tuple[Dataset, Dataset]:
    """Return the training and the validation set that `spec` names.

    `spec` is "digits" or "idx:DIR". Raises `DataError` for anything else, and for bad files.
    """
    if spec == "digits":
        return load_digits()
    kind, separator, folder = spec.partition(":")
    if kind == "idx" and separator:
        if not folder:
            raise DataError(
                'data "idx:" names no folder; give idx:DIR with the folder of MNIST\'s files'
            )
        return load_idx(Path(folder))
    raise DataError(f'data "{spec}" is unknown; give digits or idx:DIR')


def shape_and_classes(spec: str) -> tuple[tuple[int, int, int], int]:
    """Return (height, width, channels) and the number of classes of the data that `spec` names.

    What a plan needs to know. The digits' are known without scikit-learn; files are read.
    """
    if spec == "digits":
        return DIGITS_SHAPE, DIGITS_CLASSES
    train, _ = load(spec)
    return train.shape, train.classes


def load_digits() -> tuple[Dataset, Dataset]:
    """Return scikit-learn's 1797 handwritten digits as 1437 training and 360 validation rows.

    Features are (rows, 8, 8, 1). Raises `DataError` when scikit-learn is not installed.
    """
    try:
        # Loaded here because it takes a second, and a run on other data has no need of it.
        from sklearn.datasets import load_digits as sklearn_digits  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; "
            "install it with: pip install 'trlow[data]'"
        ) from error
    features, labels = sklearn_digits(return_X_y=True)
    rows = DIGITS_TRAIN_ROWS + DIGITS_VALIDATION_ROWS
    if features.shape != (rows, math.prod(DIGITS_SHAPE)):
        raise DataError(
            f"scikit-learn's digits have the shape {features.shape} instead of ({rows}, 64); "
            "install scikit-learn 1.4 or newer"
        )
    pictures = (features / 16.0).astype(np.float32).reshape(rows, *DIGITS_SHAPE)
    # The legacy generator, because numpy promises that its stream never changes (NEP 19).
    order = np.random.RandomState(DIGITS_SPLIT_SEED).permutation(rows)

    def take(name: str, part: npt.NDArray[np.intp]) -> Dataset:
        return Dataset(name, pictures[part], labels[part].astype(np.int32), DIGITS_CLASSES)

    return (
        take("digits (training)", order[:DIGITS_TRAIN_ROWS]),
        take("digits (validation)", order[DIGITS_TRAIN_ROWS:]),
    )


def load_idx(folder: Path) -> tuple[Dataset, Dataset]:
    """Return MNIST's training and test files in `folder`, each plain or with .gz behind its name.

    Features are (rows, height, width, 1). Raises `DataError` naming the file, for a file that is
    missing, unreadable, truncated, too long or of another kind, and for sets that do not fit.
    """
    train = _load_idx_pair(folder, "train")
    validation = _load_idx_pair(folder, "t10k")
    if train.shape != validation.shape:
        raise DataError(
            f"{folder}: training pictures are {train.shape[:2]} and test pictures "
            f"{validation.shape[:2]}; both must have one size"
        )
    return train, validation


def _load_idx_pair(folder: Path, prefix: str) -> Dataset:
    images_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images = _read_idx(images_path, IDX_IMAGES_MAGIC, 3)
    labels = _read_idx(labels_path, IDX_LABELS_MAGIC, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} pictures and {labels_path} {len(labels)} labels; "
            "the two counts must be equal"
        )
    features = (images.astype(np.float32) / np.float32(255)).reshape(*images.shape, 1)
    return Dataset(str(labels_path), features, labels.astype(np.int32), IDX_CLASSES)


def _find(folder: Path, name: str) -> Path:
    """Return the file or its gzipped twin; the plain one wins."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give idx:DIR with the folder of MNIST's files")
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name} is missing, and so is {name}.gz; put one of them there")


def _read_idx(path: Path, magic: int, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array of an IDX file of unsigned bytes: magic number, sizes, values."""
    opener = cast("Callable[[Path, str], BinaryIO]", gzip.open if path.suffix == ".gz" else open)
    try:
        with opener(path, "rb") as file:
            return _parse_idx(path, file, magic, dimensions)
    except EOFError as error:
        raise DataError(f"{path} ends inside its gzip stream; fetch the file again") from error
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parse_idx(path: Path, file: BinaryIO, magic: int, dimensions: int) -> npt.NDArray[np.uint8]:
    """Check the header against what follows; never read more than the header promises."""
    header_nbytes = 4 * (1 + dimensions)
    header = file.read(header_nbytes)
    if len(header) >= 4 and int.from_bytes(header[:4], "big") != magic:
        raise DataError(
            f"{path} begins with the magic number 0x{header[:4].hex()} instead of 0x{magic:08x}; "
            "it is no such IDX file, or is compressed without .gz behind its name"
        )
    if len(header) < header_nbytes:
        raise DataError(
            f"{path} is truncated: {len(header)} bytes, and the header alone has {header_nbytes}; "
            "fetch the file again"
        )
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4")[1:])
    nbytes = math.prod(shape)
    if nbytes == 0:
        raise DataError(f"{path} says it holds {shape} values; every size must be at least 1")
    body = _read_at_most(file, nbytes)
    if len(body) < nbytes:
        raise DataError(
            f"{path} is truncated: {len(body)} bytes behind the header, and its sizes "
            f"{shape} ask for {nbytes}; fetch the file again"
        )
    if file.read(1):
        raise DataError(
            f"{path} has bytes behind the {nbytes} that its sizes {shape} ask for; "
            "fetch the file again"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _read_at_most(file: BinaryIO, nbytes: int) -> bytes:
    """Read in pieces: `file.read(nbytes)` would allocate what a broken header promises."""
    pieces = []
    while nbytes and (piece := file.read(min(nbytes, 1 << 20))):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)
