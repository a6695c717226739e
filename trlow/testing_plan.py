"""Invariants 1 to 12: what holds for every memory plan, as checks that raise AssertionError.

Each check rebuilds or recomputes what the plan says from the plan's own tensors, so a plan that was
tampered with fails it. None of them needs a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from trlow.dtensor import DTensor
from trlow.dtype import F16, F32, U8
from trlow.errors import PlanError
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.range_op import cast, copy
from trlow.region import Region, RegionTable

__all__ = [
    "check_adding_moves_only_what_lies_behind",
    "check_alignment",
    "check_beyond_32_bits",
    "check_buckets_cover_gradients",
    "check_empty_region_changes_nothing",
    "check_fingerprint",
    "check_freezing_moves_nothing",
    "check_ranges_are_unions",
    "check_refusals_name_both",
    "check_regions_in_order",
    "check_same_offsets",
    "check_variants_share_offsets",
    "require",
]


def require(holds: object, message: str) -> None:
    """Raise AssertionError with the message unless `holds`; python -O does not switch it off."""
    if not holds:
        raise AssertionError(message)


def check_same_offsets(plan: MemoryPlan) -> None:
    """1: whoever plans the same tensors, in whatever order of regions, gets the same offsets."""
    backwards = sorted(plan.tensors, key=lambda t: (-plan.table.index(t.region), t.id))
    for order in (plan.tensors, backwards):
        again = _rebuilt(plan, order=order)
        moved = plan.diff(again)
        require(again.tensors == plan.tensors, f"planned again, tensors lie elsewhere:\n{moved}")
        require(again.fingerprint() == plan.fingerprint(), "planned again, the digest differs")


def check_alignment(plan: MemoryPlan) -> None:
    """2: every offset is a multiple of the alignment, and so is the arena of its own."""
    for tensor in plan.tensors:
        require(not tensor.offset % plan.alignment, f"{tensor} is not on {plan.alignment} bytes")
    for name, extent in plan.extents.items():
        require(not extent.start % plan.alignment, f"{name} starts at {extent.start}")
    require(not plan.arena_nbytes % plan.arena_alignment, f"arena of {plan.arena_nbytes} bytes")


def check_regions_in_order(plan: MemoryPlan) -> None:
    """3: slots are disjoint, inside the arena and in the order of the table and of their ids."""
    places = [(plan.table.index(t.region), t.id) for t in plan.tensors]
    require(places == sorted(places), "tensors are not in table order")
    require([place[1] for place in places] == list(range(len(places))), "ids are not positions")
    for one, other in pairwise(plan.tensors):
        require(one.offset + one.slot_nbytes <= other.offset, f"{one} overlaps {other}")
    ranges = [plan.region_range(region.name) for region in plan.table]
    for a, b in pairwise(ranges):
        require(a.end <= b.offset, f"region {a} overlaps {b}")
    require(all(r.end <= plan.arena_nbytes for r in ranges), "a region leaves the arena")


def check_ranges_are_unions(plan: MemoryPlan) -> None:
    """4: range(a, b) holds the slots of regions a to b and pads, not a byte more or less."""
    for first, last, inside in _region_pairs(plan):
        span = plan.span(first, last)
        slots = [t for t in plan.tensors if t.region in inside]
        label = f"{span} from {first} to {last}"
        if not slots:
            require(span.nbytes == 0, f"{label} has no slot, but bytes")
            continue
        require(span.offset == min(t.offset for t in slots), f"{label} starts elsewhere")
        require(span.end == max(t.offset + t.slot_nbytes for t in slots), f"{label} ends elsewhere")
        for t in plan.tensors:
            slot = Range(t.offset, t.slot_nbytes, U8, t.name, t.name)
            require(span.overlaps(slot) == (t.region in inside), f"{label} and {slot}")
        if len({plan.table[name].dtype for name in inside}) == 1:
            typed = plan.range(first, last)
            require((typed.offset, typed.nbytes) == (span.offset, span.nbytes), f"{typed}, {label}")


def check_empty_region_changes_nothing(plan: MemoryPlan) -> None:
    """5: with an empty region put in anywhere, tensors, ranges and buckets stay as they are."""
    for position, neighbour in enumerate(plan.table):
        empty = Region("EMPTY", neighbour.dtype, "empty", kind="EMPTY")
        around = plan.table.regions
        table = RegionTable(
            plan.table.name, (*around[:position], empty, *around[position:]), plan.table.buckets
        )
        other = _rebuilt(plan, table=table)
        require(other.tensors == plan.tensors, f"an empty region before {neighbour.name} moves")
        require(other.buckets() == plan.buckets(), f"an empty region at {position} shifts a bucket")
        before = [region.name for region in around[: position + 1]]
        behind = [region.name for region in around[position:]]
        around_it = {(name, behind[-1]) for name in before} | {(before[0], name) for name in behind}
        for first, last in around_it:
            mine, theirs = plan.span(first, last), other.span(first, last)
            require(mine.nbytes == theirs.nbytes, f"an empty region in {mine} gives {theirs}")
            if mine.nbytes:
                require(mine == theirs, f"an empty region in {mine} gives {theirs}")


def check_variants_share_offsets(plan: MemoryPlan) -> None:
    """6: a tensor has one offset and one slot in all variants, and every variant fits the slot."""
    for base in plan.tensors:
        shapes = [plan.tensor(base.name, variant) for variant in (None, *plan.variants)]
        for tensor in shapes:
            same = (tensor.offset, tensor.slot_nbytes, tensor.id) == (
                base.offset,
                base.slot_nbytes,
                base.id,
            )
            require(same, f"{tensor} is a variant of {base} and lies elsewhere")
            require(tensor.nbytes <= base.slot_nbytes, f"{tensor} leaves its slot")
        largest = max(tensor.nbytes for tensor in shapes)
        require(largest == base.slot_nbytes, f"{base}: its largest variant has {largest} bytes")


def check_freezing_moves_nothing(plan: MemoryPlan, frozen: Collection[str] = ()) -> None:
    """7: freezing leaves every offset; a bucket stays in what it was, and its ends are trained.

    With nothing given, every gradient alone and all of them together are frozen in turn.
    """
    gradients = [t.name for t in plan.tensors if plan.table[t.region].kind == "G"]
    sets = [frozenset(frozen)] if frozen else [*({name} for name in gradients), set(gradients)]
    before, whole = plan.tensors, {bucket.stage: bucket for bucket in plan.buckets()}
    for fixed in sets:
        for bucket in plan.buckets(fixed):
            was = whole[bucket.stage].range
            require(
                was.contains(bucket.range), f"{bucket.stage} moved to {bucket.range} from {was}"
            )
            inside = [t for t in plan.tensors if bucket.range.contains(plan.range(t.name))]
            require(inside, f"{bucket.stage} holds no tensor")
            ends = {inside[0].name, inside[-1].name}
            require(ends.isdisjoint(fixed), f"{bucket.stage} begins or ends with frozen {ends}")
    require(plan.tensors == before, "freezing changed the plan")


def check_adding_moves_only_what_lies_behind(plan: MemoryPlan, region: str | None = None) -> None:
    """8: a tensor added to a region, or to each in turn, leaves all that lies before its end."""
    for name in [region] if region is not None else [r.name for r in plan.table]:
        larger = _rebuilt(plan, extra=(name, "added", (3,)))
        limit = plan.table.index(name)
        for tensor in plan.tensors:
            now = larger[tensor.name].offset
            if plan.table.index(tensor.region) <= limit:
                require(now == tensor.offset, f"{tensor} moved to {now}: {name} lies behind it")
            else:
                require(now > tensor.offset, f"{tensor} stayed at {now}: {name} lies before it")


def check_fingerprint(plan: MemoryPlan) -> None:
    """9: JSON keeps the digest; another table, offset, dtype, shape or alignment changes it."""
    again = MemoryPlan.from_json(plan.to_json())
    require(again.fingerprint() == plan.fingerprint(), "JSON changed the fingerprint")
    require(again.tensors == plan.tensors, f"JSON changed the tensors:\n{plan.diff(again)}")
    require(not plan.diff(again), f"JSON changed the plan:\n{plan.diff(again)}")
    for what, other in _changed(plan):
        require(other.fingerprint() != plan.fingerprint(), f"another {what}, the same fingerprint")
        require(plan.diff(other), f"another {what}, but diff names nothing")


def check_buckets_cover_gradients(plan: MemoryPlan, frozen: Collection[str] = ()) -> None:
    """10: buckets are disjoint, and each trained gradient lies whole in exactly one of them."""
    buckets = plan.buckets(frozen)
    for one, other in combinations(buckets, 2):
        require(not one.range.overlaps(other.range), f"{one.stage} overlaps {other.stage}")
    for tensor in plan.tensors:
        if plan.table[tensor.region].kind == "G" and tensor.name not in frozen:
            slot = plan.range(tensor.name)
            owners = [bucket.stage for bucket in buckets if bucket.range.contains(slot)]
            require(len(owners) == 1, f"gradient {slot} lies in buckets {owners}")


def check_refusals_name_both(plan: MemoryPlan) -> None:
    """11: mixed dtypes, reversed pairs, sizes that do not divide and overlaps are refused."""
    for one, other in pairwise(plan.tensors):
        names = (one.name, other.name)
        _refused(names, plan.range, other.name, one.name)
        _refused(names, plan.span, other.name, one.name)
        if one.dtype != other.dtype:
            _refused(names, plan.range, one.name, other.name)
    for tensor in plan.tensors:
        whole = plan.range(tensor.name)
        names = (tensor.name, "other")
        if tensor.dtype.itemsize > 1:
            for offset, nbytes in ((whole.offset, whole.nbytes - 1), (whole.offset + 1, 0)):
                _refused(names, Range, offset, nbytes, tensor.dtype, *names)
        _refused(names, copy, whole, replace(whole, first="other", last="other"))
        nothing = Range(0, 0, U8, "other", "other")
        _refused(names, cast, whole, nothing)


def check_beyond_32_bits(plan: MemoryPlan) -> None:
    """12: with 2**33 + 1 elements in front, every offset moves by exactly their slot."""
    table = RegionTable(
        plan.table.name,
        (Region("LARGE", F32, "larger than 32 bits", kind="LARGE"), *plan.table.regions),
        plan.table.buckets,
    )
    count = 2**33 + 1
    large = _rebuilt(plan, table=table, extra=("LARGE", "large", (count,)))
    slot = -(-count * 4 // plan.alignment) * plan.alignment
    require(large["large"].count == count, "elements beyond 2**33 are lost")
    require(large.range("large").count == count, "elements of a range beyond 2**33 are lost")
    for tensor in plan.tensors:
        now = large[tensor.name].offset
        require(now == tensor.offset + slot, f"{tensor} moved to {now} behind {slot} bytes")
    if plan.tensors:
        span = large.span("LARGE", plan.table.regions[-1].name)
        last = plan.tensors[-1]
        require(span.end == slot + last.offset + last.slot_nbytes, f"{span} ends elsewhere")


def _refused(names: tuple[str, str], act: Callable[..., object], *args: object) -> None:
    try:
        made = act(*args)
    except PlanError as error:
        for name in names:
            require(name in str(error), f"{name!r} is not named by: {error}")
    else:
        raise AssertionError(f"{names} should have been refused, but gave {made}")


def _region_pairs(plan: MemoryPlan) -> Iterator[tuple[str, str, set[str]]]:
    names = [region.name for region in plan.table]
    for i, first in enumerate(names):
        for j in range(i, len(names)):
            yield first, names[j], set(names[i : j + 1])


def _rebuilt(
    plan: MemoryPlan,
    *,
    table: RegionTable | None = None,
    order: Iterable[DTensor] | None = None,
    extra: tuple[str, str, tuple[int, ...]] | None = None,
) -> MemoryPlan:
    """Plan the same tensors again, over another table, in another order or with one more."""
    builder = PlanBuilder(
        plan.table if table is None else table,
        alignment=plan.alignment,
        arena_alignment=plan.arena_alignment,
    )
    for tensor in plan.tensors if order is None else order:
        variants = plan.shapes.get(tensor.name)
        builder.add(tensor.region, tensor.name, tensor.shape, variants=variants)
    if extra is not None:
        builder.add(*extra)
    return builder.build()


def _changed(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield plans that differ from this one in one thing, with its name."""
    yield "alignment", replace(plan, alignment=plan.alignment * 2)
    yield "arena alignment", replace(plan, arena_alignment=plan.arena_alignment * 2)
    table, first = plan.table, plan.table.regions[0]
    yield "table", replace(plan, table=replace(table, name=f"{table.name} changed"))
    flag = replace(first, persistent=not first.persistent)
    yield "region", replace(plan, table=replace(table, regions=(flag, *table.regions[1:])))
    dtype = replace(first, dtype=F16 if first.dtype == F32 else F32)
    yield "dtype", replace(plan, table=RegionTable(table.name, (dtype, *table.regions[1:])))
    if plan.tensors:
        last = plan.tensors[-1]
        moved = replace(last, offset=last.offset + plan.alignment)
        yield "offset", replace(plan, tensors=(*plan.tensors[:-1], moved))
        shaped = replace(last, shape=(*last.shape, 1), strides=(*last.strides, 1))
        yield "shape", replace(plan, tensors=(*plan.tensors[:-1], shaped))
