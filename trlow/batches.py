"""What the host writes for one step of one rank: rows of a dataset and the scalars of the step.

A global batch of N*B rows is cut by rank: rank r takes rows r*B to (r+1)*B of it. Training takes
only full global batches, in an order that depends on seed and epoch and is the same on every rank;
validation takes every row, and pads the last batches with zeros that `rows` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trlow.data import Dataset
from trlow.errors import DataError, ModelError
from trlow.nn.initial import philox

# Philox streams of the epochs' orders: far behind those of the parameters, which count from 0.
ORDER_STREAM = 1 << 32


class Slot(Protocol):
    """Writable arrays of a step's inputs by name."""

    def __getitem__(self, name: str) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of `local_batch` rows a rank out of `dataset`, in the order `order` (row numbers).

    `scalars` are the same in every step, `rates` holds the learning rate of each (none: 0).
    """

    dataset: Dataset
    order: NDArray[np.int64]
    world_size: int
    local_batch: int
    scalars: Mapping[str, float]
    rates: tuple[float, ...] = ()
    first_step: int = 0  # what the replay calls the first of these steps

    @property
    def steps(self) -> int:
        """Steps until every row of the order was taken; the last may be short."""
        return -(-len(self.order) // (self.world_size * self.local_batch))

    def rows(self, rank: int, step: int) -> NDArray[np.int64]:
        """Row numbers of one rank's real rows; none where the data ends before this rank."""
        start = ((step - self.first_step) * self.world_size + rank) * self.local_batch
        return self.order[start : start + self.local_batch]

    def fill(self, rank: int, step: int, slot: Slot) -> None:
        """Write labels, data and scalars; rows behind the real ones are zero."""
        rows = self.rows(rank, step)
        count = len(rows)
        data, labels = slot["data"], slot["label"]
        # mode="clip" spares numpy a second buffer; row numbers are a permutation, so in range
        np.take(self.dataset.features, rows, axis=0, out=data[:count], mode="clip")
        np.take(self.dataset.labels, rows, out=labels[:count], mode="clip")
        data[count:] = 0
        labels[count:] = 0
        for name, value in self.scalars.items():
            slot[name][0] = value
        slot["rows"][0] = count
        slot["lr"][0] = self.rates[step - self.first_step] if self.rates else 0.0


def epoch_order(rows: int, global_batch: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of the rows for one epoch, cut to full global batches."""
    order = philox(seed, ORDER_STREAM + epoch).permutation(rows)
    return order[: rows - rows % global_batch]


def check_data(train: Dataset, validation: Dataset, global_batch: int, classes: int) -> None:
    """Two datasets of one kind, at least one full batch, and a model that ends in their classes.

    Raises DataError or ModelError, which name both sides.
    """
    if train.shape != validation.shape or train.classes != validation.classes:
        raise DataError(
            f"{train.name} has rows of {train.shape} in {train.classes} classes, {validation.name} "
            f"{validation.shape} in {validation.classes}: train and validate on the same kind"
        )
    if global_batch > train.rows:
        raise DataError(
            f"a global batch of {global_batch} rows is larger than {train.name} with its "
            f"{train.rows} training rows: use at most {train.rows}"
        )
    if classes != train.classes:
        raise ModelError(
            f"the model ends in {classes} classes, {train.name} has {train.classes}: "
            f"end with fc({train.classes})"
        )
