"""Numbers in a rank's bytes, by numpy: read, stored with rounding, and drawn with few bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trlow.dtype import BF16, F16, F32, U8, DType
from trlow.plan import MemoryPlan, Range

__all__ = [
    "MANTISSA",
    "Bytes",
    "Floats",
    "encoded",
    "initial_bytes",
    "load",
    "read",
    "round_bf16",
    "rounded",
    "store",
    "whole",
    "widen_bf16",
]

Bytes = NDArray[np.uint8]  # one rank's arena
Floats = NDArray[np.float32]

MANTISSA = {F32: 24, F16: 11, BF16: 8}  # bits, the hidden one too
_FACTORS = (1.0, 0.5, -1.0, 2.0, 0.25)  # of scalars: products with few-bit numbers stay exact


def whole(plan: MemoryPlan) -> Range:
    """Return the whole arena as bytes."""
    return Range(0, plan.arena_nbytes, U8, "arena", "arena")


def read(state: Bytes, r: Range) -> NDArray[Any]:
    """Return a view of a range in its numpy type."""
    return state[r.offset : r.end].view(r.dtype.numpy)


def initial_bytes(plan: MemoryPlan, rank: int, seed: int = 0) -> Bytes:
    """Return an arena of numbers with few bits, other ones on every rank, and pads of 0.

    One float32 alone is a factor, a power of two, and equal on all ranks; integers are 0 or 1.
    """
    generator = np.random.default_rng([seed, rank])
    shared = np.random.default_rng(seed)
    state = np.zeros(plan.arena_nbytes, np.uint8)
    for tensor in plan.tensors:
        r = plan.range(tensor.name)
        if r.dtype not in MANTISSA:
            read(state, r)[:] = shared.integers(0, 2, r.count)
        elif r.dtype == F32 and r.count == 1:
            read(state, r)[:] = shared.choice(_FACTORS)
        else:
            limit = 8 if r.dtype == F32 else 4
            store(state, r, generator.integers(-limit + 1, limit, r.count).astype(np.float32))
    return state


def round_bf16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round float32 bits to bfloat16 bits, to nearest even; a NaN becomes a quiet one."""
    wide = bits.astype(np.uint64)
    rounded = (wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def widen_bf16(bits: NDArray[np.uint16]) -> Floats:
    """Return the float32 numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def load(state: Bytes, r: Range) -> Floats:
    """Return a range's numbers in float32."""
    values = read(state, r)
    return widen_bf16(values) if r.dtype == BF16 else values.astype(np.float32)


def store(state: Bytes, r: Range, values: Floats) -> bool:
    """Round to the range's dtype; tell whether all stored numbers are finite."""
    read(state, r)[:] = encoded(values, r.dtype)
    return bool(np.isfinite(load(state, r)).all())


def encoded(values: Floats, dtype: DType) -> NDArray[Any]:
    """Round to a dtype, as it lies in memory."""
    if dtype == BF16:
        return round_bf16(np.ascontiguousarray(values, np.float32).view(np.uint32))
    return values.astype(dtype.numpy)


def rounded(values: Floats, dtype: DType) -> Floats:
    """Round to a dtype and widen again."""
    bits = encoded(values, dtype)
    return widen_bf16(bits) if dtype == BF16 else bits.astype(np.float32)
