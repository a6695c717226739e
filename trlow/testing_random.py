"""A hypothesis strategy for programs of range operations that a device can run.

Small on purpose: a few stages over two or three slots of each dtype, so that their ranges meet
often, in every way in which an order can be forgotten.
"""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from trlow import exchange, range_op
from trlow.dtype import BF16, F16, F32, I32
from trlow.errors import PlanError
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import Program, Stage, Stream
from trlow.range_op import RangeOp
from trlow.region import Region, RegionTable

__all__ = ["device_programs", "small_plan"]

_TABLE = RegionTable(
    "small",
    (
        Region("W_SMALL", F32, "weights", persistent=True),
        Region("G_SMALL", F32, "gradients"),
        Region("L_SMALL", F16, "float16"),
        Region("Q_SMALL", BF16, "bfloat16"),
        Region("S_SCALAR", F32, "factors"),
        Region("K_FLAG", I32, "flags"),
        Region("K_TOKEN", I32, "what ranks meet with"),
    ),
)
_FLOATS = ("W_SMALL", "G_SMALL", "L_SMALL", "Q_SMALL")
_KINDS = (
    *("clear", "copy", "copy_unless", "cast", "scale", "sum_all_reduce", "mean_all_reduce"),
    *("broadcast", "accumulate_metrics", "nan_check", "update", "add", "exchange"),
)


def small_plan() -> MemoryPlan:
    """Return the plan that `device_programs` use: two slots of each dtype, factors and flags."""
    builder = PlanBuilder(_TABLE, alignment=64)
    for region in _FLOATS:
        builder.add(region, f"{region}.0", (5,))
        builder.add(region, f"{region}.1", (40,))
    for k in range(4):
        builder.add("S_SCALAR", f"factor.{k}", (1,))
    for k in range(2):
        builder.add("K_FLAG", f"flag.{k}", (1,))
    builder.add("K_TOKEN", "token", (1,))
    return builder.build()


@st.composite
def device_programs(
    draw: st.DrawFn, world_size: int, phases: int = 1, most: int = 6
) -> tuple[MemoryPlan, Program]:
    """A small plan and a program on it of up to `most` stages a phase, on all five streams."""
    plan = small_plan()
    stages = [
        [
            Stage(
                f"{phase}.{k}",
                draw(st.sampled_from(list(Stream))),
                sum((draw(_ops(plan, world_size)) for _ in range(draw(st.integers(1, 2)))), ()),
            )
            for k in range(draw(st.integers(1, most)))
        ]
        for phase in range(phases)
    ]
    program = Program("drawn", tuple(map(tuple, stages)))
    try:
        program.edges()
    except PlanError:  # stages two steps apart conflict, and nothing between orders them
        assume(False)
    return plan, program


@st.composite
def _ops(draw: st.DrawFn, plan: MemoryPlan, world_size: int) -> tuple[RangeOp, ...]:
    """One op; of an exchange all three."""
    kind = draw(st.sampled_from(_KINDS))
    if kind != "exchange":
        return (draw(_op(kind, plan, world_size)),)
    inbox, token = draw(_parts(plan, draw(st.sampled_from(_FLOATS)))), plan.range("token")
    sent = exchange.send(inbox, draw(_beside(plan, inbox, cast=False)))
    return exchange.admit(token, inbox), sent, exchange.receive(token, inbox)


@st.composite
def _op(draw: st.DrawFn, kind: str, plan: MemoryPlan, world_size: int) -> RangeOp:
    factor = plan.range(f"factor.{draw(st.integers(0, 2))}")
    flag = plan.range(f"flag.{draw(st.integers(0, 1))}")
    region = draw(st.sampled_from(("W_SMALL", "G_SMALL") if kind in _ONLY_F32 else _FLOATS))
    r = draw(_parts(plan, region))
    match kind:
        case "clear":
            return range_op.clear(draw(st.sampled_from([r, flag, plan.range("factor.3")])))
        case "scale":
            return range_op.scale(r, factor)
        case "sum_all_reduce":
            return range_op.sum_all_reduce(r)
        case "mean_all_reduce":
            strategies = range_op.MEAN_STRATEGIES[: 4 if r.dtype == F32 else 3]
            return range_op.mean_all_reduce(
                r, factor=factor, strategy=draw(st.sampled_from(strategies))
            )
        case "broadcast":
            return range_op.broadcast(r, root=draw(st.integers(0, world_size - 1)))
        case "nan_check":
            return range_op.nan_check(flag, r)
    other = draw(_beside(plan, r, cast=kind == "cast"))
    match kind:
        case "copy":
            return range_op.copy(r, other)
        case "copy_unless":
            return range_op.copy_unless(r, other, flag)
        case "cast":
            return range_op.cast(r, other)
        case "add":
            return exchange.add(r, other)
        case "accumulate_metrics":
            return range_op.accumulate_metrics(r, other, plan.range("factor.3"), flag)
    return range_op.update("sgd", r, other, lr=factor, grad_scale=plan.range("factor.3"), skip=flag)


_ONLY_F32 = {"accumulate_metrics", "update"}


@st.composite
def _parts(draw: st.DrawFn, plan: MemoryPlan, region: str, count: int | None = None) -> Range:
    """Some elements of a region, pads between its slots too, `count` of them if it is given."""
    extent = plan.range(region)
    if count is None:
        count = min(draw(st.sampled_from([1, 2, 3, 7, 15, 17, 33])), extent.count)
    first = draw(st.integers(0, extent.count - count))
    size = extent.dtype.itemsize
    return Range(
        extent.offset + first * size, count * size, extent.dtype, f"{region}[{first}]", region
    )


@st.composite
def _beside(draw: st.DrawFn, plan: MemoryPlan, r: Range, *, cast: bool) -> Range:
    """As many elements, of a dtype that `r` may be copied from or cast from, apart from `r`."""
    regions: tuple[str, ...]
    if cast:
        regions = _FLOATS[2:] if r.dtype == F32 else _FLOATS[:2]
    else:
        regions = tuple(name for name in _FLOATS if plan.table[name].dtype == r.dtype)
    other = draw(_parts(plan, draw(st.sampled_from(regions)), r.count))
    assume(not other.overlaps(r))
    return other
