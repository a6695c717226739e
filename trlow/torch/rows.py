"""Tables that let one kernel work on pieces of many tensors, wherever those lie.

Torch's multi-tensor kernels give a block 65,536 elements, so a small model leaves most of a GPU
idle; a row here is a sixteenth of that, and the number of blocks is the caller's choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

GATHER = "gather_rows"  # the kernel that copies them
ROW_NBYTES = 16 << 10


def alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether equal bytes at equal places are equal elements: dense, of one dtype and strides."""
    first = tensors[0]
    return all(
        each.dtype is first.dtype
        and each.shape == first.shape
        and each.stride() == first.stride()
        and each.device == first.device
        and not each.is_conj()
        and not each.is_neg()
        for each in tensors
    ) and _dense(first)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory; permuted as they may be."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def rows(groups: Iterable[Sequence[torch.Tensor | None]], unit: int) -> Iterator[list[int]]:
    """For each piece of each group of tensors that are ``alike``: their places, then how much.

    Addresses and extent count in ``unit`` bytes; the place of a tensor that is not there is 0.
    """
    for tensors in groups:
        nbytes = next(each.nbytes for each in tensors if each is not None)
        for start in range(0, nbytes, ROW_NBYTES):
            places = (0 if each is None else each.data_ptr() + start for each in tensors)
            extent = min(ROW_NBYTES, nbytes - start)
            yield [*(place // unit for place in places), extent // unit]


class Table:
    """Rows in the memory of a device; made before they are known, filled when they are."""

    def __init__(self, device: torch.device, found: Iterator[list[int]]) -> None:
        self._rows = torch.tensor(list(found), dtype=torch.int64)
        self._there = torch.empty_like(self._rows, device=device)

    @property
    def entries(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def takes(self, other: torch.Tensor) -> bool:
        """Hold other rows from the next ``fill`` on, if there is just the room for them."""
        fits = other.shape == self._rows.shape
        if fits:
            self._rows = other
        return fits

    @property
    def address(self) -> int:
        """Where the rows are on the device, once they are filled in."""
        return self._there.data_ptr()

    def fill(self) -> None:
        """Copy the rows to the device, in the order of torch's current stream."""
        self._there.copy_(self._rows)
