"""Data whose result is exactly predictable, for every dtype and operation, in any order of adding.

Inputs are small whole numbers, few enough that every partial sum is one too (and fits the dtype);
for products they are 1 and 2. Each rank has its own block of `PERIOD` elements, repeated over the
buffer: the period is prime, so a chunk that lands in the wrong place shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trlow.bench.collectives import Collective
from trlow.dtype import DTYPES, DType
from trlow.errors import SettingsError

OPS = ("sum", "prod", "max", "min", "avg", "mulsum")  # nccl-tests' names; mulsum is premulsum
PERIOD = 8191
Array = NDArray[np.generic]

# nccl-tests' names beside trlow's own.
DTYPE_NAMES = {"half": "float16", "float": "float32", "double": "float64"} | {
    "f8e4m3": "float8_e4m3",
    "f8e5m2": "float8_e5m2",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
}
# (whole numbers are exact up to here, powers of two up to 2**this); wide types stay small, too
_LIMITS = {
    "int8": (127, 6),
    "uint8": (255, 7),
    "float16": (2048, 15),
    "bfloat16": (256, 30),
    "float8_e4m3": (16, 8),
    "float8_e5m2": (8, 15),
}
_WIDE = (4096, 30)
_MINIFLOATS = {"float8_e4m3": (4, 3), "float8_e5m2": (5, 2)}  # exponent and mantissa bits


def is_float(dtype: DType) -> bool:
    """Whether it has fractions."""
    return "float" in dtype.name


def dtype_of(name: str) -> DType:
    """The dtype that trlow or nccl-tests calls `name`. Raises SettingsError."""
    found = DTYPES.get(DTYPE_NAMES.get(name, name))
    if found is None:
        raise SettingsError(f'dtype "{name}" is unknown; NCCL has {", ".join(DTYPES)}')
    return found


def check_op(op: str, dtype: DType, ranks: int, *, exact: bool) -> None:
    """Raise SettingsError for an operation that cannot be, or not be checked exactly."""
    if op == "avg" and not is_float(dtype):
        raise SettingsError(
            f"-o avg on {dtype}: NCCL truncates an integer average towards zero; use -o sum, or a "
            "float"
        )
    if op == "avg" and exact and ranks & (ranks - 1):
        raise SettingsError(
            f"-o avg over {ranks} ranks rounds 1/{ranks}, so no result is exact; use -c 0"
        )


def factors(op: str, ranks: int) -> tuple[int, ...]:
    """What each rank's input is multiplied by before the sum: 1 and 2 in turn for mulsum."""
    return tuple(1 + rank % 2 if op == "mulsum" else 1 for rank in range(ranks))


def numbers(dtype: DType, op: str, ranks: int) -> list[NDArray[np.int64]]:
    """Each rank's block as whole numbers."""
    most, exponent = _LIMITS.get(dtype.name, _WIDE)
    places = np.arange(PERIOD)
    generators = [np.random.default_rng((20, rank)) for rank in range(ranks)]
    if op in {"max", "min"}:
        least = 0 if dtype.name.startswith("u") else -most
        return [made.integers(least, most + 1, PERIOD) for made in generators]
    if op == "prod":
        # at most `exponent` ranks contribute a 2 at any place
        mine = [(places - rank) % ranks < exponent for rank in range(ranks)]
        return [
            np.where(made.integers(0, 2, PERIOD) & taken, 2, 1)
            for made, taken in zip(generators, mine, strict=True)
        ]
    weights = factors(op, ranks)
    top = most // sum(weights)
    if top == 0:
        few = most // max(weights)
        found = [((places - rank) % ranks < few).astype(np.int64) for rank in range(ranks)]
        if op == "avg" and ranks & (ranks - 1) == 0:  # as exact as a 1
            return [block * ranks for block in found]
    else:
        found = [made.integers(0, top + 1, PERIOD) for made in generators]
    # so that every input is a whole multiple of the number of ranks, and its share exact
    return [block // ranks * ranks for block in found] if op == "avg" else found


def combined(op: str, blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The result over all ranks."""
    stacked = np.stack(blocks)
    if op in {"prod", "max", "min"}:
        by = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
        return np.asarray(by.reduce(stacked, axis=0), np.int64)
    total = (stacked * np.array(factors(op, len(blocks)))[:, None]).sum(axis=0)
    return np.asarray(total // len(blocks) if op == "avg" else total, np.int64)


def encode(values: NDArray[np.int64], dtype: DType) -> Array:
    """Whole numbers in a dtype's own bytes. They are exact in it, by construction."""
    if dtype.name == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.name in _MINIFLOATS:
        table = _minifloats(dtype.name)
        codes = {value: code for code, value in reversed(list(enumerate(table)))}
        lowest, highest = int(values.min(initial=0)), int(values.max(initial=0))
        lookup = [codes.get(float(value), -1) for value in range(lowest, highest + 1)]
        return np.array(lookup)[values - lowest].astype(np.uint8)
    return values.astype(dtype.numpy)


def decode(element: np.generic, dtype: DType) -> float | int:
    """One element of a buffer as a number."""
    if dtype.name == "bfloat16":
        return float(np.array([int(element) << 16], np.uint32).view(np.float32)[0])
    if dtype.name in _MINIFLOATS:
        return _minifloats(dtype.name)[int(element)]
    value: float | int = element.item()
    return value


@cache
def _minifloats(name: str) -> tuple[float, ...]:
    """The value of every byte (OCP 8-bit floating point, section 5)."""
    exponent_bits, mantissa_bits = _MINIFLOATS[name]
    bias, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    values = []
    for code in range(256):
        exponent = code >> mantissa_bits & top
        mantissa = code & (2**mantissa_bits - 1)
        value = math.ldexp(mantissa + (2**mantissa_bits if exponent else 0), max(exponent, 1))
        value = math.ldexp(value, -bias - mantissa_bits)
        if exponent == top and exponent_bits == 5:
            value = math.nan if mantissa else math.inf
        elif exponent == top and mantissa == 2**mantissa_bits - 1:
            value = math.nan
        values.append(-value if code & 0x80 else value)
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, start + count) of a buffer: `block` over and over, begun at `phase`."""

    start: int
    count: int
    block: Array
    phase: int = 0

    def part(self, first: int, count: int) -> Array:
        """Elements [first, first + count) of the segment."""
        shift = (self.phase + first) % PERIOD
        return np.resize(np.roll(self.block, -shift), count)


class Exact:
    """Inputs and results of one collective over `ranks` ranks."""

    def __init__(
        self, collective: Collective, dtype: DType, op: str, root: int, ranks: int
    ) -> None:
        self.collective = collective
        self.ranks = ranks
        self.root = root
        blocks = numbers(dtype, op if collective.reduces else "max", ranks)
        self.inputs = [encode(block, dtype) for block in blocks]
        self.result = encode(combined(op, blocks), dtype) if collective.reduces else None

    def sent(self, rank: int, count: int) -> Segment:
        """What a rank's send buffer holds."""
        return Segment(0, self.collective.counts(count, self.ranks)[0], self.inputs[rank])

    def received(self, rank: int, count: int) -> list[Segment]:
        """What a rank's receive buffer must hold afterwards; nothing where it is not specified."""
        name = self.collective.name
        if self.result is not None:
            if name == "reduce" and rank != self.root:
                return []
            phase = rank * count if name == "reduce_scatter" else 0
            return [Segment(0, count, self.result, phase)]
        if name == "all_gather":
            return [Segment(k * count, count, self.inputs[k]) for k in range(self.ranks)]
        source = self.root if name == "broadcast" else (rank - 1) % self.ranks
        return [Segment(0, count, self.inputs[source])]
