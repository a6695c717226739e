"""Hypothesis strategies for regions, tables, plans, ranges and programs, small on purpose.

Shapes stay small so that shrinking is quick; large sizes are the matter of invariant 12, which adds
its own. Every table drawn here has each of its gradient regions in exactly one bucket.
"""

from __future__ import annotations

from hypothesis import strategies as st

from trlow.action import Collective, FeedCopy, Launch, RangeOp
from trlow.dtype import DTYPES, F16, F32, I32, U8, DType
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import External, Program, Stage, Stream
from trlow.range_op import clear, copy, scale, sum_all_reduce
from trlow.region import CNN_TABLE, BucketSpec, Region, RegionTable

__all__ = [
    "byte_ranges",
    "dtypes",
    "few_bit_floats",
    "frozen_sets",
    "plan_ranges",
    "plans",
    "programs",
    "regions",
    "shapes",
    "tables",
    "training_steps",
    "variants",
    "world_sizes",
]


def dtypes() -> st.SearchStrategy[DType]:
    """Every element type."""
    return st.sampled_from(list(DTYPES.values()))


def world_sizes(*, any_world_size: bool = False, most: int = 64) -> st.SearchStrategy[int]:
    """Numbers of ranks from 1 to `most`: powers of two, or all."""
    if any_world_size:
        return st.integers(1, most)
    return st.sampled_from([2**k for k in range(most.bit_length())])


def few_bit_floats(bits: int = 4, exponent: int = 8) -> st.SearchStrategy[float]:
    """Numbers n * 2**e with |n| < 2**bits and |e| <= exponent.

    Sums of a few hundred of them are exact in float32 in any order, and so are their means over a
    power of two of ranks.
    """
    limit = 2**bits - 1
    return st.builds(
        lambda n, e: n * 2.0**e,
        st.integers(-limit, limit),
        st.integers(-exponent // 2, exponent // 2),
    )


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes of 0 to 3 dimensions."""
    return st.lists(st.integers(1, 40), max_size=3).map(tuple)


def variants() -> st.SearchStrategy[dict[str, tuple[int, ...]]]:
    """Shapes of up to three variants by name."""
    return st.dictionaries(st.sampled_from(["short", "validation", "large"]), shapes(), max_size=3)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """One region; gradients and weights are the likeliest kinds."""
    kind, dtype, persistent, linked = draw(_looks())
    name = draw(st.text("ABCDEFXYZ_", min_size=1, max_size=8))
    return Region(name, dtype, "drawn", persistent, kind, name if linked else None)


def _looks() -> st.SearchStrategy[tuple[str, DType, bool, bool]]:
    """Kind, dtype, whether persistent, whether in a family of parameters."""
    return st.tuples(
        st.sampled_from(["G", "G", "W", "M", "R"]),
        st.sampled_from([F32, F32, F32, F16, I32, U8]),
        st.booleans(),
        st.booleans(),
    )


@st.composite
def tables(draw: st.DrawFn, most: int = 8) -> RegionTable:
    """A table of 1 to `most` regions. Each run of gradients of one dtype is a bucket, or two."""
    looks = draw(st.lists(_looks(), min_size=1, max_size=most))
    drawn = [
        Region(f"{kind}_{k}", dtype, "drawn", persistent, kind, f"P{k}" if linked else None)
        for k, (kind, dtype, persistent, linked) in enumerate(looks)
    ]
    specs: list[BucketSpec] = []
    run: list[Region] = []
    for region in [*drawn, None]:
        if run and (
            region is None
            or region.kind != "G"
            or region.dtype != run[0].dtype
            or draw(st.booleans())
        ):
            specs.append(BucketSpec(f"COMM_{len(specs)}", run[0].name, run[-1].name))
            run = []
        if region is not None and region.kind == "G":
            run.append(region)
    return RegionTable("drawn", tuple(drawn), tuple(draw(st.permutations(specs))))


@st.composite
def plans(draw: st.DrawFn, table: RegionTable | None = None, most: int = 12) -> MemoryPlan:
    """A plan of up to `most` tensors over a table, a drawn one if none is given."""
    chosen = draw(tables()) if table is None else table
    alignment = draw(st.sampled_from([256, 8, 64, 512]))
    builder = PlanBuilder(
        chosen, alignment=alignment, arena_alignment=draw(st.sampled_from([4096, 512]))
    )
    names = [region.name for region in chosen]
    tensors = st.tuples(st.sampled_from(names), shapes(), variants())
    for k, (region, shape, others) in enumerate(draw(st.lists(tensors, max_size=most))):
        builder.add(region, f"t{k}", shape, variants=others)
    return builder.build()


def frozen_sets(plan: MemoryPlan) -> st.SearchStrategy[frozenset[str]]:
    """Sets of gradient tensors that are not trained."""
    gradients = [t.name for t in plan.tensors if plan.table[t.region].kind == "G"]
    if not gradients:
        return st.just(frozenset())
    return st.frozensets(st.sampled_from(gradients))


@st.composite
def plan_ranges(draw: st.DrawFn, plan: MemoryPlan) -> Range:
    """A typed range of a plan, of one region or several, or within a region."""
    names = [*(region.name for region in plan.table), *(t.name for t in plan.tensors)]
    name = draw(st.sampled_from(names))
    region = name if name in plan.table else plan[name].region
    inside = [t.name for t in plan.tensors_in(region)]
    behind = inside[inside.index(name) :] if name in inside else [*inside, name]
    return plan.range(name, draw(st.sampled_from(behind)))


def byte_ranges(arena_nbytes: int = 64, dtype: DType = U8) -> st.SearchStrategy[Range]:
    """A range of 0 to 8 elements in a small arena."""
    size = dtype.itemsize
    elements = arena_nbytes // size

    def build(first: int, count: int) -> Range:
        last = min(elements, first + count)
        return Range(first * size, (last - first) * size, dtype, f"b{first}", f"b{last}")

    return st.builds(build, st.integers(0, elements), st.integers(0, 8))


@st.composite
def programs(draw: st.DrawFn, phases: int = 1, most: int = 7) -> Program:
    """A program of stages that read, write and share resources at random."""
    drawn = [draw(st.lists(_stage_parts(), max_size=most)) for _ in range(phases)]
    return Program(
        "drawn", tuple(tuple(_stage(f"S{k}", *p) for k, p in enumerate(parts)) for parts in drawn)
    )


_Parts = tuple[Stream, str, tuple[Range, ...], tuple[Range, ...], Range, frozenset[str]]


def _stage_parts() -> st.SearchStrategy[_Parts]:
    few = st.lists(byte_ranges(), max_size=2).map(tuple)
    return st.tuples(
        st.sampled_from(list(Stream)),
        st.sampled_from(["kernel", "kernel", "collective", "feed", "external"]),
        few,
        few,
        byte_ranges(),
        st.sampled_from([frozenset(), frozenset(), frozenset({"x"}), frozenset({"y"})]),
    )


def _stage(
    name: str,
    stream: Stream,
    form: str,
    reads: tuple[Range, ...],
    writes: tuple[Range, ...],
    target: Range,
    resources: frozenset[str],
) -> Stage:
    if form == "external":
        external = External("callback", reads, writes, lambda _rank, _stream: None)
        return Stage(name, stream, external=external, resources=resources)
    if form == "collective":
        op = RangeOp(
            "drawn", (*reads, target), (*writes, target), (Collective("all_reduce", target),)
        )
    elif form == "feed":
        op = RangeOp("drawn", reads, (*writes, target), (FeedCopy("A", target),))
    else:
        op = RangeOp("drawn", reads, writes, (Launch("drawn", (*reads, *writes), 1),))
    return Stage(name, stream, (op,), resources=resources)


@st.composite
def training_steps(draw: st.DrawFn) -> tuple[MemoryPlan, frozenset[str], Program]:
    """A plan of the CNN table, what is frozen in it, and the part of a step around the overlap.

    The stages are FIRST_FWD, ZERO_GRAD, DEEP_FWD_BWD, FIRST_BWD, the communication of each bucket
    and WEIGHT_UPDATE, with the ranges that a model of such layers has.
    """
    builder = PlanBuilder(CNN_TABLE)
    for family in ("BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV", "DEEP_CONV"):
        for k, shape in enumerate(draw(st.lists(shapes(), max_size=2))):
            builder.add(f"W_{family}", f"w.{family}.{k}", shape)
            builder.add(f"G_{family}", f"g.{family}.{k}", shape)
    for region, name in (("R_RESULT", "result"), ("S_SCALAR", "factor")):
        builder.add(region, name, (3,) if region == "R_RESULT" else (1,))
    for name in ("first", "deep"):
        builder.add("F_FEATURE", f"f.{name}", (16,))
        builder.add("F_GRAD", f"d.{name}", (16,))
    plan = builder.build()
    frozen = draw(frozen_sets(plan))
    return plan, frozen, Program.single("train", _training_stages(plan, frozen))


def _training_stages(plan: MemoryPlan, frozen: frozenset[str]) -> tuple[Stage, ...]:
    first = [t.name for t in plan.tensors_in("G_FIRST_CONV") if t.name not in frozen]
    deep = [
        t.name
        for region in ("G_BN_BIAS", "G_BN_WEIGHT", "G_FC_BIAS", "G_FC_WEIGHT", "G_DEEP_CONV")
        for t in plan.tensors_in(region)
        if t.name not in frozen
    ]
    feature, grad = plan.range("f.first"), plan.range("d.first")
    written = tuple(plan.range(name) for name in (*deep, "result", "d.first", "d.deep", "f.deep"))
    weights = tuple(plan.range(t.name) for t in plan.tensors if plan.table[t.region].kind == "W")
    backward = tuple(scale(plan.range(name), plan.range("factor")) for name in first)
    reading = tuple(_kernel((feature, grad), (plan.range(name),)) for name in first)
    updates = tuple(
        copy(weight, plan.range("g" + weight.first[1:]))
        for weight in weights
        if "g" + weight.first[1:] not in frozen
    )
    buckets = plan.buckets(frozen)
    return (
        Stage("ZERO_GRAD", Stream.UPDATE, tuple(clear(b.range) for b in buckets)),
        Stage("FIRST_FWD", Stream.COMP_1, (_kernel(weights, (feature,)),)),
        Stage("DEEP_FWD_BWD", Stream.COMP_1, (_kernel((feature, *weights), written),)),
        Stage("FIRST_BWD", Stream.COMP_1, (*reading, *backward)),
        *(Stage(b.stage, Stream.UPDATE, (sum_all_reduce(b.range),)) for b in buckets),
        Stage("WEIGHT_UPDATE", Stream.UPDATE, updates),
    )


def _kernel(reads: tuple[Range, ...], writes: tuple[Range, ...]) -> RangeOp:
    return RangeOp("model", reads, writes, (Launch("model", (*reads, *writes), 1),))
