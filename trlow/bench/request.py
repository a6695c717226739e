"""What one `trlow bench` is asked, checked as far as it can be without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trlow.bench.collectives import COLLECTIVES, PLACES, Collective
from trlow.bench.exact import check_op, dtype_of
from trlow.bench.job import Job
from trlow.bench.seat import SCALE_KERNELS
from trlow.bench.variant import Variant
from trlow.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sizes of one collective in one or more variants."""

    collective: str
    sizes: tuple[int, ...]  # bytes
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    iterations: int = 20
    warmups: int = 5
    launches: int = 0
    checks: int = 1
    rounds: int = 3
    places: tuple[str, ...] = ("in-place",)
    variants: tuple[Variant, ...] = (Variant(),)
    actual: bool = True  # read what NCCL took from its log, in a pass of its own
    deadline_s: float = 60.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise SettingsError for what cannot be on any machine."""
        dtype_of(self.dtype)
        for size in self.sizes:
            self.record.check_size(size, dtype_of(self.dtype).itemsize, 1)
        if not self.record.in_place and "in-place" in self.places:
            raise SettingsError(f"{self.collective} has no in-place form; use --out-of-place")
        if self.record.reduces:
            check_op(self.op, dtype_of(self.dtype), 1, exact=False)
        for variant in self.variants:
            self._check_mean(variant)
            if variant.mixing is not None and not self.launches:
                raise SettingsError("--mixing concerns graphs; give -G LAUNCHES as well")

    def _check_mean(self, variant: Variant) -> None:
        if variant.mean is None:
            return
        if self.collective != "all_reduce" or self.op != "sum":
            raise SettingsError("--mean is a strategy of all_reduce, and replaces -o")
        if dtype_of(self.dtype).name not in SCALE_KERNELS:
            known = ", ".join(SCALE_KERNELS)
            raise SettingsError(f"--mean of {self.dtype}: trlow's means are of {known}")

    @property
    def record(self) -> Collective:
        """The collective's record."""
        return COLLECTIVES[self.collective]

    def check_ranks(self, ranks: int) -> None:
        """Raise SettingsError for sizes or operations that this number of ranks forbids."""
        dtype = dtype_of(self.dtype)
        for size in self.sizes:
            self.record.check_size(size, dtype.itemsize, ranks)
        exact = self.checks > 0
        if self.record.reduces:
            check_op(self.op, dtype, ranks, exact=exact)
        if any(variant.mean for variant in self.variants):
            check_op("avg", dtype, ranks, exact=exact)

    def count(self, size: int, ranks: int) -> int:
        """Elements as the call takes them."""
        return self.record.count(size, dtype_of(self.dtype).itemsize, ranks)

    def job(self, variant: Variant) -> Job:
        """What the worker of one variant is told."""
        return Job(
            collective=self.collective,
            dtype=dtype_of(self.dtype).name,
            op=self.op if self.record.reduces else "sum",
            root=self.root,
            most=max(self.sizes),
            iterations=self.iterations,
            warmups=self.warmups,
            launches=self.launches,
            places=tuple(place for place in PLACES if place in self.places),
            variant=variant,
            settings={**self.settings, "deadline_s": self.deadline_s},
        )
