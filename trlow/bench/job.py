"""What a worker process is to measure, as plain data that travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trlow.bench.collectives import COLLECTIVES, Collective
from trlow.bench.variant import Variant
from trlow.dtype import DTYPES, DType

GUARD = 4096  # bytes before and behind each buffer that nobody may write
MEAN_OPS = {"deferred": "sum", "sum_then_scale": "sum", "avg": "avg", "premulsum": "mulsum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One variant of one request."""

    collective: str
    dtype: str
    op: str = "sum"
    root: int = 0
    most: int  # largest size in bytes
    iterations: int = 20  # eager calls, or calls in one graph
    warmups: int = 5
    launches: int = 0  # of a graph; 0: eager
    places: tuple[str, ...] = ("in-place",)
    variant: Variant = field(default_factory=Variant)
    settings: Mapping[str, Any] = field(default_factory=dict)  # over what variables say

    @property
    def record(self) -> Collective:
        """The collective's record."""
        return COLLECTIVES[self.collective]

    @property
    def element(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def result_op(self) -> str:
        """The operation that the result is that of: every mean but the deferred one is an avg."""
        mean = self.variant.mean
        return self.op if mean is None else "sum" if mean == "deferred" else "avg"

    @property
    def nccl_op(self) -> str:
        """The operation that NCCL is asked for."""
        return self.op if self.variant.mean is None else MEAN_OPS[self.variant.mean]

    @property
    def units(self) -> int:
        """How many times the timed loop enqueues something."""
        return self.launches or self.iterations

    @property
    def calls_per_unit(self) -> int:
        """Collectives in each of these."""
        return self.iterations if self.launches else 1

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that a rank needs."""
        return ("send", "recv") if "out-of-place" in self.places else ("recv",)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one allocation, guards included, as a window wants it."""
        return -(-(self.most + 2 * GUARD) // GUARD) * GUARD

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` wrote."""
        found = json.loads(text)
        variant = found.pop("variant")
        if variant["ctas"] is not None:
            variant["ctas"] = tuple(variant["ctas"])
        found["places"] = tuple(found["places"])
        return cls(variant=Variant(**variant), **found)
