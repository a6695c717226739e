"""A DTensor describes one tensor that every rank has at the same offset. It owns no memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trlow.dtype import DType

__all__ = ["DTensor", "row_major_strides"]


@dataclass(frozen=True, slots=True)
class DTensor:
    """One named tensor in one slot of the arena.

    The slot is as large as the largest variant of the tensor, so `slot_nbytes >= nbytes`.
    """

    id: int  # position in the plan, counted in arena order
    name: str
    shape: tuple[int, ...]  # () is a scalar
    dtype: DType
    region: str
    offset: int  # bytes from the arena's start
    strides: tuple[int, ...]  # elements, row-major
    slot_nbytes: int  # bytes, without the pad behind the slot

    @property
    def count(self) -> int:
        """Elements of this shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of this shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte behind this shape, from the arena's start."""
        return self.offset + self.nbytes


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a dense row-major tensor of this shape."""
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))
