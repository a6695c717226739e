"""Tables for the kernels that take rows: pieces of all sizes, apart, half of them aligned."""

from __future__ import annotations

import numpy as np

ARRAYS = {"gather_rows": 2, "momentum_rows": 4, "adam_rows": 5}
SIZES = (64, 1, 257, 7, 1024, 33, 16, 515)


def table(kernel: str, entries: int) -> np.ndarray:
    """``entries`` rows of offsets, one for each array, and an extent; int64, flat."""
    arrays, found, place = ARRAYS[kernel], [], 0
    for entry in range(entries):
        size = SIZES[entry % len(SIZES)]
        odd = entry // len(SIZES) % 2  # every other round begins anywhere
        found += [*(place + odd * (1 + 5 * array) for array in range(arrays)), size]
        place += -(-(size + 16) // 16) * 16
    return np.array(found, np.int64)


def extent(kernel: str, entries: int) -> int:
    """Elements that an array needs."""
    return max(1, int(table(kernel, entries).reshape(entries, -1)[:, :2].sum(1).max()) + 1100)
