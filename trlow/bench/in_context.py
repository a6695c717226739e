"""A plan's own communication, alone and beside a backward that keeps the GPU busy.

The ranges are those of the compiled model: both buckets, statistics, results. The backward is
synthetic: one fully connected layer's, on memory behind the plan's own, repeated until it lasts
longer than the communication. Both are stages of one captured program, timed by stamps of the
device's clock. A collective's time is that of the rank which came last, so that waiting for a peer
does not count; what the same stages take in the real step stands beside.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trlow.dtype import F32
from trlow.measure import exposed_training_comm_us, trace_training
from trlow.nn.compiler import Compiled
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.program import Program, Stage, Stream
from trlow.range_op import Collective, Launch, RangeOp
from trlow.region import Region, RegionTable
from trlow.runtime import Runtime
from trlow.settings import Settings
from trlow.task import Task
from trlow.trace import Trace, preserved, stamped

LOAD = "T_BENCH_LOAD"
SIZES = {"host": (64, 64, 64), "cuda": (512, 512, 256)}  # rows, inputs, outputs of the layer
LEAST_US, MOST_LAYERS = 200.0, 256
Stamps = Sequence[NDArray[np.int64]]  # per rank: (steps, stages, 2) in ns


@dataclass(slots=True)
class StageTimes:
    """One communication stage; medians over steps and rounds, in µs."""

    stage: str
    ranges: list[str]
    nbytes: int
    alone_us: float
    context_us: float  # beside the backward
    backward_us: float  # alone
    backward_beside_us: float  # while the stage runs
    exposed_us: float  # what both together last longer than the backward alone
    step_us: float | None  # in the real training step

    @property
    def slow_down(self) -> float:
        """Of the backward by the communication."""
        return self.backward_beside_us / self.backward_us


@dataclass(slots=True)
class Found:
    """Everything of one plan."""

    model: str
    ranks: int
    fingerprint: str
    stages: list[StageTimes] = field(default_factory=list)
    compute_us: float = 0.0  # of the real step: all stages that only compute
    comm_us: float = 0.0  # and all that communicate
    exposed_step_us: float = 0.0  # what communication adds to a real step
    hung: bool = False  # ranks did not come back: only the end of the process helps

    @property
    def ratio(self) -> float:
        """Computation over communication in the real step."""
        return self.compute_us / self.comm_us if self.comm_us else math.inf

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        stages = [{**asdict(one), "slow_down": one.slow_down} for one in self.stages]
        return {**asdict(self), "stages": stages, "ratio": self.ratio}


def measure(task: Task, settings: Settings, steps: int, rounds: int) -> Iterator[Found]:
    """Yield what is known after each stage, the last time whole. Opens `task`, of several ranks.

    Raises UsageError, RankError; `hung` tells whether only the end of the process helps then.
    """
    with task:
        compiled = task.compile()
        found = Found(task.name, compiled.world_size, compiled.plan.fingerprint())
        trace = trace_training(task, steps)
        found.exposed_step_us = exposed_training_comm_us(task, steps)
        platform = task.runtime.platform.name
    silent = _add_step(found, compiled, trace)
    plan = with_load(compiled.plan, SIZES[platform])
    runtime = Runtime(settings, plan)
    try:
        with runtime, preserved(runtime):
            for stage in communication(compiled):
                found.stages.append(_stage(runtime, stage, silent.get(stage.name), steps, rounds))
                yield found
    finally:
        found.hung = runtime.dead


def communication(compiled: Compiled) -> list[Stage]:
    """The stages that communicate in a step and in a validation, each once."""
    programs = [compiled.programs[name] for name in ("train", "validate_result")]
    found: dict[str, Stage] = {}
    for program in programs:
        for stage in program.phases[0]:
            if collectives(stage):
                found.setdefault(stage.name, stage)
    return list(found.values())


def collectives(stage: Stage) -> list[Collective]:
    """What a stage communicates."""
    return [action for action in stage.actions if isinstance(action, Collective)]


def with_load(plan: MemoryPlan, sizes: tuple[int, int, int]) -> MemoryPlan:
    """The same plan with memory for the synthetic backward behind it: nothing moves."""
    rows, inputs, outputs = sizes
    regions = (*plan.table.regions, Region(LOAD, F32, "a synthetic backward"))
    table = RegionTable(plan.table.name, regions, plan.table.buckets)
    builder = PlanBuilder(table, alignment=plan.alignment, arena_alignment=plan.arena_alignment)
    for tensor in plan.tensors:
        variants = plan.shapes.get(tensor.name)
        builder.add(tensor.region, tensor.name, tensor.shape, variants=variants)
    for name, shape in (
        ("bench.dx", (rows, inputs)),
        ("bench.dy", (rows, outputs)),
        ("bench.w", (inputs, outputs)),
    ):
        builder.add(LOAD, name, shape)
    return builder.build()


def backward(plan: MemoryPlan, layers: int) -> Stage:
    """`layers` times the gradient of a layer's input, on a computing stream."""
    dx, dy, w = (plan.range(f"bench.{name}") for name in ("dx", "dy", "w"))
    rows, inputs = plan["bench.dx"].shape
    outputs = plan["bench.w"].shape[1]
    launch = Launch("fc_bwd_data", (dx, dy, w, rows, inputs, outputs), rows * inputs)
    op = RangeOp("bench_backward", (dy, w), (dx,), (launch,))
    return Stage("BACKWARD", Stream.COMP_1, (op,) * layers)


def _add_step(found: Found, compiled: Compiled, trace: Trace) -> dict[str, float]:
    """Sums over the real step, and what each of its communication stages took there."""
    stages = {stage.name: stage for phase in compiled.programs["train"].phases for stage in phase}
    comm: dict[str, float] = {}
    for name, stage in stages.items():
        steps: dict[int, list[float]] = {}
        for span in trace.spans:
            if span.stage == name:
                steps.setdefault(span.step, []).append(span.end_us - span.start_us)
        if not steps or stage.stream is Stream.TRANS:
            continue
        if collectives(stage):
            comm[name] = statistics.median(min(ranks) for ranks in steps.values())
        else:
            found.compute_us += statistics.median(max(ranks) for ranks in steps.values())
    found.comm_us = sum(comm.values())
    return comm


def _stage(
    runtime: Runtime, stage: Stage, step_us: float | None, steps: int, rounds: int
) -> StageTimes:
    """Programs alone and together, in turn, round by round."""
    alone = Program.single("alone", (stage,))
    first = _comm_us(stamped(runtime, alone, steps), 0)
    once = Program.single("backward once", (backward(runtime.plan, 1),))
    one = _median(_spans(stamped(runtime, once, steps), 0))
    layers = min(MOST_LAYERS, max(1, math.ceil(max(LEAST_US, 2 * first) / one)))
    load = backward(runtime.plan, layers)
    busy = Program.single("backward", (load,))
    both = Program.single("together", (load, stage))
    rows = []
    for _ in range(rounds):
        alone_us = _comm_us(stamped(runtime, alone, steps), 0)
        backward_us = _median(_spans(stamped(runtime, busy, steps), 0))
        together = stamped(runtime, both, steps)
        whole = _median([_whole(own) for own in together])
        rows.append(
            (
                alone_us,
                _comm_us(together, 1),
                backward_us,
                _median(_spans(together, 0)),
                max(0.0, whole - backward_us),
            )
        )
    ranges = [f"{one.range.first} … {one.range.last}" for one in collectives(stage)]
    nbytes = sum(one.range.nbytes for one in collectives(stage))
    alone_us, context_us, backward_us, beside_us, exposed_us = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    return StageTimes(
        stage.name,
        ranges,
        nbytes,
        alone_us,
        context_us,
        backward_us,
        beside_us,
        exposed_us,
        step_us,
    )


def _spans(stamps: Stamps, place: int) -> list[NDArray[np.float64]]:
    """Per rank the µs of one stage in every step but the first, which warms."""
    return [(own[1:, place, 1] - own[1:, place, 0]) / 1000.0 for own in stamps]


def _whole(own: NDArray[np.int64]) -> NDArray[np.float64]:
    """From the first start to the last end, per step."""
    found: NDArray[np.float64] = (own[1:, :, 1].max(axis=1) - own[1:, :, 0].min(axis=1)) / 1000.0
    return found


def _median(per_rank: Sequence[NDArray[np.float64]]) -> float:
    return float(np.median(np.stack(per_rank)))


def _comm_us(stamps: Stamps, place: int) -> float:
    """Of the rank that came last, which waited for nobody."""
    return float(np.median(np.stack(_spans(stamps, place)).min(axis=0)))
