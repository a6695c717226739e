"""A plan as text: the JSON document, its digest, the table for people, and what moved between two.

The document is written from the layout and never trusted when read: `parse` returns only what a
builder needs, and the caller compares what it rebuilt with what was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from trlow.dtype import DTYPES
from trlow.errors import PlanError
from trlow.layout import Layout
from trlow.region import BucketSpec, Region, RegionTable

__all__ = [
    "COLUMNS",
    "FORMAT",
    "Document",
    "describe",
    "differences",
    "document",
    "fingerprint",
    "parse",
    "rows",
    "short",
]

FORMAT = 1  # version of the JSON document; a reader refuses any other
COLUMNS = ("region", "dtype", "offset", "bytes", "slots", "pad")  # of the table for people

_REPORT = {"traffic_nbytes_per_rank", "ranges"}  # keys of `trlow plan --json` alone


class Document(NamedTuple):
    """What a builder needs of a document, checked for type; and the document itself."""

    table: RegionTable
    alignment: int
    arena_alignment: int
    tensors: list[tuple[str, str, list[int], dict[str, list[int]]]]  # region, name, shape, variants
    raw: dict[str, Any]


def document(layout: Layout) -> dict[str, Any]:
    """Return the layout as JSON values, without the fingerprint."""
    extents = layout.extents
    return {
        "trlow_plan": FORMAT,
        "arena_nbytes": layout.arena_nbytes,
        "alignment": layout.alignment,
        "arena_alignment": layout.arena_alignment,
        "table": layout.table.name,
        "buckets": [
            {"stage": spec.stage, "first": spec.first, "last": spec.last}
            for spec in layout.table.buckets
        ],
        "variants": list(layout.variants),
        "regions": [
            {
                "name": region.name,
                "dtype": region.dtype.name,
                "offset": extents[region.name].start,
                "nbytes": extents[region.name].end - extents[region.name].start,
                "slots": extents[region.name].slots,
                "meaning": region.meaning,
                "persistent": region.persistent,
                "kind": region.kind,
                "parameter": region.parameter,
            }
            for region in layout.table
        ],
        "dtensors": [
            {
                "id": tensor.id,
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype.name,
                "region": tensor.region,
                "offset": tensor.offset,
                "nbytes": tensor.nbytes,
                "slot_nbytes": tensor.slot_nbytes,
                "variants": {
                    name: list(shape) for name, shape in layout.shapes.get(tensor.name, {}).items()
                },
            }
            for tensor in layout.tensors
        ],
    }


def fingerprint(written: dict[str, Any]) -> str:
    """Return the sha256 of a document in hex."""
    text = json.dumps(written, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def parse(text: str) -> Document:
    """Read a document. Raises PlanError for anything that is not one of this format."""
    try:
        raw = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"this is no plan in JSON: {error}") from error
    if isinstance(raw, dict) and "trlow_plan" not in raw and raw.keys() >= _REPORT:
        raise PlanError(
            "this is the report that `trlow plan --json` prints, from which no plan can be made "
            "again; give the document that MemoryPlan.to_json() returns"
        )
    if not isinstance(raw, dict) or raw.get("trlow_plan") != FORMAT:
        found = raw.get("trlow_plan", "no version") if isinstance(raw, dict) else type(raw).__name__
        raise PlanError(
            f"plan document of format {found!r}; this trlow reads format {FORMAT}: plan again"
        )
    regions = tuple(_region(item) for item in _field(raw, "regions", list))
    buckets = tuple(
        BucketSpec(*(_field(item, key, str) for key in ("stage", "first", "last")))
        for item in _field(raw, "buckets", list)
    )
    return Document(
        RegionTable(_field(raw, "table", str), regions, buckets),
        _field(raw, "alignment", int),
        _field(raw, "arena_alignment", int),
        [_tensor(item) for item in _field(raw, "dtensors", list)],
        raw,
    )


def _region(item: object) -> Region:
    dtype = _field(item, "dtype", str)
    if dtype not in DTYPES:
        raise PlanError(f"plan document: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    parameter = _field(item, "parameter", (str, type(None)))
    return Region(
        _field(item, "name", str),
        DTYPES[dtype],
        _field(item, "meaning", str),
        _field(item, "persistent", bool),
        _field(item, "kind", str),
        parameter,
    )


def _tensor(item: object) -> tuple[str, str, list[int], dict[str, list[int]]]:
    return (
        _field(item, "region", str),
        _field(item, "name", str),
        _field(item, "shape", list),
        _field(item, "variants", dict),
    )


def _field(item: object, key: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(item, dict) or key not in item:
        raise PlanError(f"plan document: {key!r} is missing in {short(item)}")
    value = item[key]
    if not isinstance(value, kind):
        raise PlanError(
            f"plan document: {key!r} has the value {short(value)}, which is of the wrong type"
        )
    return value


def short(value: object, limit: int = 60) -> str:
    """Return the start of a value's repr, for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def rows(layout: Layout, *, empty: bool = True) -> list[tuple[str, str, int, int, int, int]]:
    """Return the table of the regions, without empty ones if asked; the last row has the sums.

    The bytes of a region run from its offset to the end of its last slot, pads inside included;
    its pad is what lies behind, up to the next row's offset.
    """
    found: list[tuple[str, str, int, int, int, int]] = []
    places = [(name, one) for name, one in layout.extents.items() if empty or one.slots]
    ends = [extent.start for _, extent in places] + [layout.arena_nbytes]
    for (name, (start, end, _, slots)), following in zip(places, ends[1:], strict=True):
        dtype = layout.table[name].dtype.name
        found.append((name, dtype, start, end - start, slots, following - end))
    nbytes, pad = sum(row[3] for row in found), sum(row[5] for row in found)
    return [*found, ("arena", "", layout.arena_nbytes, nbytes, len(layout.tensors), pad)]


def describe(layout: Layout) -> str:
    """Return `rows` of every region as text."""
    cells = [COLUMNS, *(tuple(map(str, row)) for row in rows(layout))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return "\n".join(_row(row, widths) for row in cells)


def _row(row: tuple[str, ...], widths: list[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join(names + numbers)


def differences(old: Layout, new: Layout) -> Iterator[str]:
    """Yield one line for each thing that `new` has otherwise than `old`; none if they agree."""
    for key in ("alignment", "arena_alignment"):
        before, after = getattr(old, key), getattr(new, key)
        if before != after:
            yield f"{key}: {before} -> {after}"
    yield from _table_differences(old.table, new.table)
    mine = {tensor.name: tensor for tensor in old.tensors}
    theirs = {tensor.name: tensor for tensor in new.tensors}
    yield from (f"{name}: only in the first plan" for name in mine if name not in theirs)
    yield from (f"{name}: only in the second plan" for name in theirs if name not in mine)
    for name, tensor in mine.items():
        if name not in theirs:
            continue
        other = theirs[name]
        for key in ("region", "dtype", "shape", "slot_nbytes"):
            before, after = getattr(tensor, key), getattr(other, key)
            if before != after:
                yield f"{name}: {key} {before} -> {after}"
        before, after = (dict(one.shapes.get(name, {})) for one in (old, new))
        if before != after:
            yield f"{name}: variants {before} -> {after}"
        if tensor.offset != other.offset:
            yield f"{name}: moved {tensor.offset} -> {other.offset}"
    if old.arena_nbytes != new.arena_nbytes:
        yield f"arena: {old.arena_nbytes} -> {new.arena_nbytes} bytes"


def _table_differences(old: RegionTable, new: RegionTable) -> Iterator[str]:
    if old.name != new.name:
        yield f"table: {old.name} -> {new.name}"
    mine = {region.name: region for region in old}
    theirs = {region.name: region for region in new}
    yield from (f"region {name}: only in the first plan" for name in mine if name not in theirs)
    yield from (f"region {name}: only in the second plan" for name in theirs if name not in mine)
    common = [name for name in mine if name in theirs]
    if common != [name for name in theirs if name in mine]:
        yield "regions: another order"
    for name in common:
        for key in ("dtype", "meaning", "persistent", "kind", "parameter"):
            before, after = getattr(mine[name], key), getattr(theirs[name], key)
            if before != after:
                yield f"region {name}: {key} {before} -> {after}"
    if old.buckets != new.buckets:
        yield f"buckets: {_specs(old)} -> {_specs(new)}"


def _specs(table: RegionTable) -> str:
    return ", ".join(f"{spec.stage} {spec.first}..{spec.last}" for spec in table.buckets) or "none"
