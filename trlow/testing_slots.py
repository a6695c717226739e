"""How the checks of a device build their plans and programs, and run them: the parts they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trlow import exchange, range_op
from trlow.dtype import BF16, F16, F32, I32, DType
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import Program, Stage, Stream
from trlow.range_op import RangeOp
from trlow.region import Region, RegionTable
from trlow.runtime import Runtime
from trlow.testing_bytes import Bytes, whole

__all__ = [
    "MODES",
    "OPTIMIZERS",
    "Slots",
    "Start",
    "every_op",
    "one_stage_each",
    "prepared",
    "run",
    "update_of",
]

MODES = ("eager", "fused", "staged")
OPTIMIZERS = ("sgd", "momentum", "nesterov")
Start = Callable[[MemoryPlan, int], Bytes]  # (plan, rank): what its arena holds before the steps

_TABLE = RegionTable(
    "slots",
    (
        Region("W_F32", F32, "weights", persistent=True),
        Region("G_F32", F32, "float32"),
        Region("G_F16", F16, "float16"),
        Region("G_BF16", BF16, "bfloat16"),
        Region("S_SCALAR", F32, "scalars"),
        Region("S_INT", I32, "integers"),
    ),
)
_REGIONS = {F32: "G_F32", F16: "G_F16", BF16: "G_BF16", I32: "S_INT"}
_BEHIND = 8  # elements of a slot behind its range


class Slots:
    """Slots of `count` elements that begin `offset` elements into theirs, and their plan."""

    def __init__(self, offset: int, count: int) -> None:
        self.offset, self.count = offset, count
        self._builder = PlanBuilder(_TABLE)
        self._asked: dict[str, tuple[int, int]] = {}  # name: (first element, count)

    def add(
        self, name: str, dtype: DType = F32, *, count: int | None = None, region: str = ""
    ) -> None:
        """Add a slot with elements before and behind its range."""
        elements = self.count if count is None else count
        shape = (self.offset + elements + _BEHIND,)
        self._builder.add(region or _REGIONS[dtype], name, shape)
        self._asked[name] = (self.offset, elements)

    def scalars(self, *names: str, dtype: DType = F32) -> None:
        """Add slots of one element each, at their start."""
        for name in names:
            self._builder.add("S_SCALAR" if dtype == F32 else "S_INT", name, (1,))
            self._asked[name] = (0, 1)

    def optimizers(self) -> None:
        """Add weight "<kind>.<form>.w", moment ".m" and gradient ".g" of every optimizer."""
        for kind in OPTIMIZERS:
            for form in ("weight", "bias"):
                self.add(f"{kind}.{form}.w", region="W_F32")
                self.add(f"{kind}.{form}.m")
                self.add(f"{kind}.{form}.g")

    def build(self) -> tuple[MemoryPlan, dict[str, Range]]:
        """Return the plan, and every slot's range by name."""
        plan = self._builder.build()
        ranges = {}
        for name, (first, count) in self._asked.items():
            dtype, start = plan[name].dtype, plan[name].offset
            size = dtype.itemsize
            ranges[name] = Range(start + first * size, count * size, dtype, name, name)
        return plan, ranges


def update_of(at: Mapping[str, Range], kind: str, form: str) -> RangeOp:
    """Return the optimizer update of `Slots.optimizers` with scalars lr, mu, and so on."""
    moments = {} if kind == "sgd" else {"momentum": at[f"{kind}.{form}.m"], "mu": at["mu"]}
    return range_op.update(
        kind,
        at[f"{kind}.{form}.w"],
        at[f"{kind}.{form}.g"],
        lr=at["lr"],
        grad_scale=at["grad_scale"],
        skip=at["skip"],
        weight_decay=at["weight_decay"] if form == "weight" else None,
        **moments,
    )


def one_stage_each(name: str, ops: Iterable[RangeOp]) -> Program:
    """Return a program with a stage for each op, on the five streams in turn."""
    streams = list(Stream)
    return Program.single(
        name,
        [Stage(f"{k}.{op.kind}", streams[k % len(streams)], (op,)) for k, op in enumerate(ops)],
    )


def every_op(offset: int = 0, count: int = 17) -> tuple[MemoryPlan, Program]:
    """Return a program of every range operation but the feed, each on slots of its own."""
    plan, at = _slots_of_every_op(offset, count).build()
    return plan, one_stage_each("every op", [*_ops_of_one_type(at), *_ops_of_many_types(at)])


def _slots_of_every_op(offset: int, count: int) -> Slots:
    slots = Slots(offset, count)
    slots.scalars("lr", "mu", "weight_decay", "grad_scale", "factor", "eps", "token")
    slots.scalars("skip", "flag.float32", "flag.float16", "flag.bfloat16", dtype=I32)
    slots.optimizers()
    for name in ("clear", "to", "from", "unless.to", "unless.from", "total", "metrics"):
        slots.add(name)
    for name in ("eq_scale", "eq_bias", "weight", "bias", "mean", "var"):
        slots.add(name)
    for dtype in (F32, F16, BF16):
        for kind in ("scale", "mean", "stats", "checked", "added", "sent", "inbox"):
            slots.add(f"{kind}.{dtype}", dtype)
    for dtype in (F32, F16, BF16, I32):
        slots.add(f"sum.{dtype}", dtype)
        slots.add(f"broadcast.{dtype}", dtype)
    for dtype in (F16, BF16):
        for name in ("low", "low.from"):
            slots.add(f"{name}.{dtype}", dtype)
        for name in ("high", "high.from"):
            slots.add(f"{name}.{dtype}")
    return slots


def _ops_of_one_type(at: Mapping[str, Range]) -> list[RangeOp]:
    factor, skip = at["factor"], at["skip"]
    return [
        range_op.clear(at["clear"]),
        range_op.copy(at["to"], at["from"]),
        range_op.copy_unless(at["unless.to"], at["unless.from"], skip),
        range_op.accumulate_metrics(at["total"], at["metrics"], factor, skip),
        range_op.bn_inference(
            *(at["eq_scale"], at["eq_bias"], at["weight"], at["bias"], at["mean"], at["var"]),
            at["eps"],
        ),
        *(update_of(at, kind, form) for kind in OPTIMIZERS for form in ("weight", "bias")),
    ]


def _ops_of_many_types(at: Mapping[str, Range]) -> list[RangeOp]:
    factor = at["factor"]
    ops: list[RangeOp] = []
    for dtype in (F32, F16, BF16):
        ops += [
            range_op.scale(at[f"scale.{dtype}"], factor),
            range_op.mean_all_reduce(at[f"mean.{dtype}"], factor=factor),
            range_op.bn_stats_all_reduce(at[f"stats.{dtype}"], factor=factor),
            range_op.nan_check(at[f"flag.{dtype}"], at[f"checked.{dtype}"]),
            exchange.admit(at["token"], at[f"inbox.{dtype}"]),
            exchange.send(at[f"inbox.{dtype}"], at[f"sent.{dtype}"]),
            exchange.receive(at["token"], at[f"inbox.{dtype}"]),
            exchange.add(at[f"added.{dtype}"], at[f"inbox.{dtype}"]),
        ]
    for dtype in (F32, F16, BF16, I32):
        ops += [
            range_op.sum_all_reduce(at[f"sum.{dtype}"]),
            range_op.broadcast(at[f"broadcast.{dtype}"]),
        ]
    for dtype in (F16, BF16):
        ops += [
            range_op.cast(at[f"low.{dtype}"], at[f"high.from.{dtype}"]),
            range_op.cast(at[f"high.{dtype}"], at[f"low.from.{dtype}"]),
        ]
    return ops


def run(
    runtime: Runtime,
    program: Program,
    states: Sequence[Bytes],
    mode: str = "fused",
    steps: int = 1,
) -> list[Bytes]:
    """Fill every arena with its state, run steps in a mode, and return what the arenas hold.

    What warms up does so first: it may change what is not persistent.
    """
    replay = prepared(runtime, program, mode)
    place = whole(runtime.plan)
    for arena, state in zip(runtime.arenas, states, strict=True):
        arena.copy_in(place, state)
    replay(steps, 0)
    return [arena.copy_out(place) for arena in runtime.arenas]


def prepared(runtime: Runtime, program: Program, mode: str) -> Callable[[int, int], None]:
    """Return what runs a program from now on: a function of steps and the first step's number."""
    if mode == "eager":
        runtime.eager(program, 0)  # warms up alone

        def eager(steps: int, _first_step: int) -> None:
            runtime.eager(program, steps)

        return eager
    replay = runtime.capture(program, mode)
    return lambda steps, first_step: replay.run(steps, first_step=first_step)
