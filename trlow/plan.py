"""PlanBuilder collects tensors; MemoryPlan says where each lies, the same on every rank.

Regions lie one after another in table order, so everything from X to Y is one byte range. A range
is typed, and what cannot be one is refused with both names, never cut to fit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trlow.dtensor import DTensor, row_major_strides
from trlow.errors import PlanError
from trlow.layout import Entry, Layout, Range, place
from trlow.plan_text import describe, differences, document, fingerprint, parse
from trlow.region import BucketSpec, RegionTable

__all__ = ["Bucket", "MemoryPlan", "PlanBuilder", "Range"]

Shape = tuple[int, ...] | list[int]

_LEAST_ALIGNMENT = 8  # bytes: the largest item size, so that every slot start is a whole element


@dataclass(frozen=True, slots=True)
class Bucket:
    """The gradients that communication stage `stage` reduces: one range, from `first` to `last`."""

    stage: str
    first: str
    last: str
    range: Range


class PlanBuilder:
    """Collects tensors by region; `build` places them once and ends the collecting."""

    def __init__(
        self, table: RegionTable, *, alignment: int = 256, arena_alignment: int = 4096
    ) -> None:
        """Take a table and two alignments in bytes, powers of two, the second not the smaller."""
        for name, value, least in (
            ("alignment", alignment, _LEAST_ALIGNMENT),
            ("arena_alignment", arena_alignment, alignment),
        ):
            if type(value) is not int or value < least or value & (value - 1):
                raise PlanError(f"{name} {value!r} must be a power of two, and at least {least}")
        self._table = table
        self._alignment = alignment
        self._arena_alignment = arena_alignment
        self._entries: dict[str, list[Entry]] = {region.name: [] for region in table}
        self._region_of: dict[str, str] = {}
        self._built = False

    def add(
        self,
        region: str,
        name: str,
        shape: Shape,
        *,
        variants: Mapping[str, Shape] | None = None,
    ) -> str:
        """Put a tensor behind those already in its region, and return its name.

        `shape` is in elements, () a scalar; `variants` gives other shapes that live in the same
        slot, by variant name. Raises PlanError for an unknown region, a name that is taken, a
        dimension that is not a positive int, and after `build`.
        """
        if self._built:
            raise PlanError(
                f"{name!r}: allocation after finalize: this builder has built its plan and takes "
                "no more; add every tensor before build(), or use a new builder"
            )
        if region not in self._entries:
            self._table.index(region)
        if name in self._entries or not name or not isinstance(name, str):
            raise PlanError(
                f"{name!r} cannot name a tensor: a name is a string that names no region"
            )
        if name in self._region_of:
            raise PlanError(
                f"{name!r} is added to region {region!r}, but region "
                f"{self._region_of[name]!r} already has a tensor of that name; rename one"
            )
        shapes = {key: _shape(name, key, other) for key, other in (variants or {}).items()}
        self._entries[region].append(Entry(name, _shape(name, "", shape), shapes))
        self._region_of[name] = region
        return name

    def build(self) -> MemoryPlan:
        """Place everything. Raises PlanError the second time, or if the arena passes 2**63 - 1."""
        if self._built:
            raise PlanError("this builder has built its plan; use that plan or a new builder")
        layout = place(self._table, self._alignment, self._arena_alignment, self._entries)
        self._built = True
        return MemoryPlan(
            layout.table, layout.alignment, layout.arena_alignment, layout.tensors, layout.shapes
        )


def _shape(name: str, variant: str, shape: object) -> tuple[int, ...]:
    dims: tuple[int, ...] = (0,)
    if isinstance(shape, (tuple, list)):  # a text or a set is no shape, nor is one number
        dims = tuple(shape)
    for dim in dims:
        if type(dim) is not int or dim < 1:
            which = f"{name!r}, variant {variant!r}" if variant else repr(name)
            raise PlanError(
                f"{which}: shape {shape!r} must be a tuple or list of ints, each at least 1"
            )
    return dims


@dataclass(frozen=True, eq=False, repr=False)
class MemoryPlan(Layout):
    """The arena's layout with names to look it up by. One plan serves every rank.

    Two plans are equal if their fingerprints are.
    """

    def __repr__(self) -> str:
        shown = [f"{t.name} {t.dtype}{list(t.shape)} at {t.offset}" for t in self.tensors[:8]]
        more = ["..."] if len(self.tensors) > len(shown) else []
        kind, table = type(self).__name__, self.table.name
        return f"{kind}({table!r}, {self.arena_nbytes} bytes: {', '.join(shown + more)})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print one line where IPython and hypothesis would print a page of fields."""
        printer.text(repr(self))

    def __eq__(self, other: object) -> bool:
        """Compare fingerprints."""
        if not isinstance(other, MemoryPlan):
            return NotImplemented
        return self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        """Hash the fingerprint."""
        return hash(self.fingerprint())

    def tensor(self, name: str, variant: str | None = None) -> DTensor:
        """Return the tensor with the shape it has in a variant; its offset is the same in all.

        A tensor without that variant keeps its shape. Raises PlanError for an unknown name or for
        a variant that no tensor of the plan has.
        """
        base = self[name]
        if variant is None:
            return base
        if variant not in self.variants:
            known = ", ".join(self.variants) or "none"
            raise PlanError(f"{name!r}: no tensor has a variant {variant!r}; the plan has {known}")
        shape = self.shapes.get(name, {}).get(variant)
        if shape is None:
            return base
        strides = row_major_strides(shape)
        return DTensor(
            base.id, name, shape, base.dtype, base.region, base.offset, strides, base.slot_nbytes
        )

    def tensors_in(self, region: str) -> tuple[DTensor, ...]:
        """Return the tensors of a region in arena order."""
        self.table.index(region)
        extent = self.extents[region]
        return self.tensors[extent.first : extent.first + extent.slots]

    def buckets(self, frozen: Collection[str] = ()) -> tuple[Bucket, ...]:
        """Return what is reduced together, in order of readiness, without what is not trained.

        `frozen` names gradient tensors. A bucket loses frozen gradients and empty regions at both
        ends; one with nothing left is dropped. Raises PlanError for a name that is no gradient.
        """
        fixed = set(frozen)
        for name in sorted(fixed):
            if self.table[self[name].region].kind != "G":
                raise PlanError(
                    f"{name!r} cannot be frozen: region {self[name].region!r} holds no gradients"
                )
        trimmed = (self._bucket(spec, fixed) for spec in self.table.buckets)
        return tuple(bucket for bucket in trimmed if bucket is not None)

    def persistent_ranges(self) -> tuple[Range, ...]:
        """Return the bytes of all persistent regions; neighbours of one dtype are one range."""
        runs: list[list[str]] = []
        for region in self.table:
            if not self.extents[region.name].slots:
                continue
            if not region.persistent:
                runs.append([])
            elif runs and runs[-1] and self.table[runs[-1][0]].dtype == region.dtype:
                runs[-1].append(region.name)
            else:
                runs.append([region.name])
        return tuple(self.range(run[0], run[-1]) for run in runs if run)

    def traffic_nbytes_per_rank(self, world_size: int) -> int:
        """Return the bytes each rank sends to reduce all gradients once: 2 (N - 1) / N of them.

        The least that a ring all-reduce moves (busbw of nccl-tests); rounded down to a byte.
        """
        if type(world_size) is not int or world_size < 1:
            raise PlanError(f"world size {world_size!r} must be an int, at least 1")
        gradients = (t for t in self.tensors if self.table[t.region].kind == "G")
        return 2 * (world_size - 1) * sum(t.nbytes for t in gradients) // world_size

    def fingerprint(self) -> str:
        """Return the sha256 in hex of table, offsets, shapes, dtypes, variants and alignments."""
        return self._fingerprint

    def to_json(self) -> str:
        """Return the plan as JSON, indented; `from_json` reads it back."""
        return json.dumps({"fingerprint": self.fingerprint(), **document(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MemoryPlan:
        """Plan again what `to_json` wrote. Raises PlanError if the text is not that.

        What `trlow plan --json` prints is a report, and no such text.
        """
        read = parse(text)
        builder = PlanBuilder(
            read.table, alignment=read.alignment, arena_alignment=read.arena_alignment
        )
        for region, name, shape, variants in read.tensors:
            builder.add(region, name, shape, variants=variants)
        plan = builder.build()
        written = {"fingerprint": plan.fingerprint(), **document(plan)}
        for key in written.keys() | read.raw.keys():
            if written.get(key) != read.raw.get(key):
                raise PlanError(
                    f"plan document: {key!r} is not what its tables and shapes give; the text was "
                    "changed, or written by a trlow that places otherwise: plan again"
                )
        return plan

    def diff(self, other: MemoryPlan) -> str:
        """Return a line for everything that is added, gone, changed or moved in `other`."""
        return "\n".join(differences(self, other))

    def describe(self) -> str:
        """Return a table of the regions and a row of sums: offset, bytes, slots, pad behind them.

        In every row offset + bytes + pad is the offset of the next.
        """
        return describe(self)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(document(self))

    def _bucket(self, spec: BucketSpec, frozen: set[str]) -> Bucket | None:
        first, last = self._position(spec.first)[1], self._position(spec.last)[2]
        while first <= last and self.tensors[first].name in frozen:
            first += 1
        while first <= last and self.tensors[last].name in frozen:
            last -= 1
        if first > last:
            return None
        head, tail = self.tensors[first], self.tensors[last]
        start, end = self.extents[head.region], self.extents[tail.region]
        begin = head.region if first == start.first else head.name
        final = tail.region if last == end.first + end.slots - 1 else tail.name
        return Bucket(spec.stage, begin, final, self.range(begin, final))
