"""Where every slot lies: byte ranges, and the layout that a plan is made of.

The layout is one pass over the regions in table order. It depends on nothing but the table, the
alignments and the largest variant of each tensor, so a variant or a frozen layer moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from trlow.dtensor import DTensor, row_major_strides
from trlow.dtype import U8, DType
from trlow.errors import PlanError
from trlow.region import RegionTable

__all__ = ["ARENA_LIMIT", "Entry", "Extent", "Layout", "Range", "place"]

ARENA_LIMIT = 2**63 - 1  # bytes; sizes and addresses are signed 64-bit in the C interfaces


@dataclass(frozen=True, slots=True)
class Range:
    """Half-open bytes [offset, offset + nbytes) of the arena, of one dtype.

    `first` and `last` name the regions or tensors that the range runs over; they are there for
    messages. Raises PlanError if dtype does not divide the offset or the size, or one is negative.
    """

    offset: int  # bytes
    nbytes: int
    dtype: DType
    first: str
    last: str

    def __post_init__(self) -> None:
        """Refuse a range that holds no whole number of elements."""
        size = self.dtype.itemsize
        if self.offset % size or self.nbytes % size or self.offset < 0 or self.nbytes < 0:
            raise PlanError(
                f"range from {self.first!r} to {self.last!r}: {self.nbytes} bytes at offset "
                f"{self.offset} are no whole {self.dtype} elements of {size} bytes; both must be "
                f"multiples of {size}, and not negative"
            )

    @property
    def end(self) -> int:
        """First byte behind the range."""
        return self.offset + self.nbytes

    @property
    def count(self) -> int:
        """Elements, those in pads between slots included."""
        return self.nbytes // self.dtype.itemsize

    def overlaps(self, other: Range) -> bool:
        """Tell whether both ranges hold a common byte; an empty range overlaps nothing."""
        return max(self.offset, other.offset) < min(self.end, other.end)

    def contains(self, other: Range) -> bool:
        """Tell whether every byte of `other` is in this range; true if `other` is empty."""
        return not other.nbytes or (self.offset <= other.offset and other.end <= self.end)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print one line where IPython and hypothesis would print a page of fields."""
        printer.text(f"Range({self})")

    def __str__(self) -> str:
        """Name, size and place, as error messages show them."""
        name = self.first if self.first == self.last else f"{self.first}..{self.last}"
        return f"{name} ({self.count} {self.dtype} at {self.offset})"


class Entry(NamedTuple):
    """A tensor before it has a place: name, shape, and the shapes of its variants by name."""

    name: str
    shape: tuple[int, ...]
    variants: Mapping[str, tuple[int, ...]]


class Extent(NamedTuple):
    """Where a region lies. An empty region has start == end where its first slot would be."""

    start: int  # bytes
    end: int  # bytes, without the pad behind the last slot
    first: int  # id of the first tensor
    slots: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A table, two alignments, and every tensor in arena order with its offset.

    `variants` holds, for each tensor that has any, its shapes by variant name.
    """

    table: RegionTable
    alignment: int  # bytes; every slot and region starts on it
    arena_alignment: int  # bytes; the arena starts on it and is a multiple of it
    tensors: tuple[DTensor, ...]
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]

    @cached_property
    def arena_nbytes(self) -> int:
        """Bytes of the arena on each rank."""
        if not self.tensors:
            return 0
        last = self.tensors[-1]
        return _round_up(last.offset + last.slot_nbytes, self.arena_alignment)

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Names of all variants, sorted."""
        return tuple(sorted({name for shapes in self.shapes.values() for name in shapes}))

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """Where each region lies, in table order."""
        found: dict[str, Extent] = {}
        cursor = position = 0
        for region in self.table:
            first, start = position, _round_up(cursor, self.alignment)
            end = start
            while position < len(self.tensors) and self.tensors[position].region == region.name:
                tensor = self.tensors[position]
                start = tensor.offset if position == first else start
                end = tensor.offset + tensor.slot_nbytes
                position += 1
            cursor = max(cursor, end) if position > first else cursor
            found[region.name] = Extent(start, end, first, position - first)
        return found

    def __getitem__(self, name: str) -> DTensor:
        """Return the tensor of this name. Raises PlanError if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise PlanError(self._unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        """Tell whether a tensor has this name."""
        return name in self._by_name

    def region_range(self, name: str) -> Range:
        """Return a region's bytes, without the pad behind its last slot."""
        region = self.table[name]
        extent = self.extents[name]
        return Range(extent.start, extent.end - extent.start, region.dtype, name, name)

    def range(self, first: str, last: str | None = None) -> Range:
        """Return the bytes from the start of `first` to the end of `last`; each a region or tensor.

        Whole slots count, pads between them too, the pad behind the last does not. An empty region
        inside changes nothing. Raises PlanError for mixed dtypes and what `span` refuses.
        """
        last = first if last is None else last
        whole = self.span(first, last)
        start, end = self._position(first)[0], self._position(last)[0]
        dtype = self.table.regions[start].dtype
        for position in (*range(start, end), end):
            region = self.table.regions[position]
            inside = start < position < end and not self.extents[region.name].slots
            if region.dtype != dtype and not inside:
                raise PlanError(
                    f"range from {first!r} to {last!r} mixes dtypes: {dtype} and, in "
                    f"{region.name!r}, {region.dtype}; make two ranges of it"
                )
        return Range(whole.offset, whole.nbytes, dtype, first, last)

    def span(self, first: str, last: str | None = None) -> Range:
        """Return the same bytes as `range` as uint8, over mixed dtypes.

        Raises PlanError for an unknown name, and for a reversed pair.
        """
        last = first if last is None else last
        start, end = self._position(first), self._position(last)
        if end[0] < start[0] or (end[0] == start[0] and first != last and end[2] < start[1]):
            raise PlanError(f"range runs backwards: {first!r} lies behind {last!r}; swap them")
        if start[1] > end[2]:  # only empty regions
            return Range(self.extents[first].start, 0, U8, first, last)
        begin, final = self.tensors[start[1]], self.tensors[end[2]]
        nbytes = final.offset + final.slot_nbytes - begin.offset
        return Range(begin.offset, nbytes, U8, first, last)

    @cached_property
    def _by_name(self) -> dict[str, DTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def _unknown(self, name: str) -> str:
        table = self.table.name
        return f"{name!r} is neither a tensor of this plan nor a region of table {table!r}"

    def _position(self, name: str) -> tuple[int, int, int]:
        """Return a name's region index, and the ids of its first and last tensor."""
        if name in self.table:
            extent = self.extents[name]
            return self.table.index(name), extent.first, extent.first + extent.slots - 1
        tensor = self[name]
        return self.table.index(tensor.region), tensor.id, tensor.id


def place(
    table: RegionTable,
    alignment: int,
    arena_alignment: int,
    entries: Mapping[str, Sequence[Entry]],
) -> Layout:
    """Give every entry its slot: regions in table order, entries in the order given.

    `entries` has one list for each region that is not empty. Raises PlanError if the arena would
    be larger than ARENA_LIMIT.
    """
    tensors: list[DTensor] = []
    shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}
    cursor = 0
    for region in table:
        dtype = region.dtype
        for name, shape, variants in entries.get(region.name, ()):
            nbytes = math.prod(shape) * dtype.itemsize
            for other in variants.values():
                nbytes = max(nbytes, math.prod(other) * dtype.itemsize)
            if variants:
                shapes[name] = variants
            strides = row_major_strides(shape)
            tensors.append(
                DTensor(len(tensors), name, shape, dtype, region.name, cursor, strides, nbytes)
            )
            cursor = _round_up(cursor + nbytes, alignment)
            if cursor > ARENA_LIMIT:
                raise PlanError(
                    f"{name!r} of {nbytes} bytes would end at byte {cursor}; an arena holds "
                    f"at most {ARENA_LIMIT} bytes: make it smaller"
                )
    layout = Layout(table, alignment, arena_alignment, tuple(tensors), shapes)
    if layout.arena_nbytes > ARENA_LIMIT:
        raise PlanError(
            f"the arena needs {layout.arena_nbytes} bytes; it holds at most {ARENA_LIMIT}"
        )
    return layout


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
