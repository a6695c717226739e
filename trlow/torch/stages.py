"""The program of a step: torch's work as external stages, collectives between them.

On a GPU a bucket is gathered by a stage of its own, which waits for an event inside of the
backward. The program does not see that order, so it derives none, and the bucket's all-reduce runs
while the backward goes on. Where weights may change early the step of a bucket's parameters comes
right behind its all-reduce, and COMPUTE does not say that it reads them. Everything else is derived
from byte ranges as always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlow import range_op
from trlow.program import External, Program, Stage, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.plan import MemoryPlan, Range
    from trlow.range_op import RangeOp
    from trlow.torch.cuda import CudaSide
    from trlow.torch.host import HostSide

STATISTICS = ("mean", "rank0")  # what ranks do with running batch-norm statistics


@dataclass(frozen=True, slots=True)
class Ranges:
    """What the stages of a step read and write; the first three by bucket."""

    weights: tuple[Range, ...]
    gradients: tuple[Range, ...]
    masters: tuple[Range, ...]  # gradients as the optimizer reads them, if they travel otherwise
    loss: Range
    running: Range

    @classmethod
    def of(cls, plan: MemoryPlan) -> Ranges:
        """Those of a module's plan."""
        numbers = range(len(plan.table.buckets))
        weights, gradients, masters = (
            tuple(plan.range(f"{kind}_BUCKET_{k}") for k in numbers) for kind in "WGH"
        )
        return cls(weights, gradients, masters, plan.range("R_LOSS"), plan.range("B_STATISTICS"))


def step_program(
    plan: MemoryPlan, sides: Sequence[CudaSide | HostSide], statistics: str, *, last: bool
) -> Program:
    """One step; without ``last`` it only adds its gradients and tells its loss."""
    ranges, early = Ranges.of(plan), sides[0].early
    stages = [_compute(sides, ranges)]
    tail = [range_op.sum_all_reduce(ranges.loss)]
    if last and ranges.running.nbytes:
        tail.append(_statistics(ranges.running, statistics))
    for k, bucket in enumerate(ranges.gradients):
        if sides[0].overlaps:
            stages.append(_gather(sides, k, bucket))
        if last:
            ops: tuple[RangeOp, ...] = (range_op.sum_all_reduce(bucket),)
            if k == len(ranges.gradients) - 1:  # loss and statistics in one group with the last one
                ops += tuple(tail)
            stages.append(Stage(f"COMM_{k}", Stream.UPDATE, ops))
            if early:
                stages.append(_update_early(sides, k, ranges))
    if not last:
        stages.append(Stage("LOSS", Stream.UPDATE, tuple(tail)))
    elif not early:
        stages.append(_update(sides, ranges))
    return Program.single("step" if last else "micro-step", tuple(stages))


def _compute(sides: Sequence[CudaSide | HostSide], ranges: Ranges) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].compute(stream)

    reads = () if sides[0].early else ranges.weights
    written = (ranges.loss, *((ranges.running,) if ranges.running.nbytes else ()))
    also = () if sides[0].overlaps else ranges.gradients
    work = External("callback", reads, (*written, *also), body)
    return Stage("COMPUTE", Stream.COMP_1, (), work)


def _gather(sides: Sequence[CudaSide | HostSide], k: int, bucket: Range) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].gather(k, stream)  # type: ignore[union-attr]

    return Stage(f"GATHER_{k}", Stream.COMP_2, (), External("callback", (), (bucket,), body))


def _update_early(sides: Sequence[CudaSide | HostSide], k: int, ranges: Ranges) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].apply_early(k, stream)  # type: ignore[union-attr]

    bucket = ranges.gradients[k]
    counts = ranges.weights[:1] if k else ()  # the step of bucket 0 counts it for all of them
    writes = (ranges.weights[k], bucket, ranges.masters[k])
    # With nothing beside it the last one stays on the stream of its all-reduce.
    stream = Stream.TRANS if k < len(ranges.gradients) - 1 else Stream.UPDATE
    return Stage(
        f"OPTIMIZER_{k}", stream, (), External("callback", (bucket, *counts), writes, body)
    )


def _update(sides: Sequence[CudaSide | HostSide], ranges: Ranges) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].apply(stream)

    writes = (*ranges.weights, *ranges.gradients, *ranges.masters)  # clipping is in place
    work = External("callback", ranges.gradients, writes, body)
    return Stage("OPTIMIZER", Stream.UPDATE, (), work)


def _statistics(running: Range, how: str) -> RangeOp:
    if how == "mean":
        return range_op.mean_all_reduce(running, strategy="avg")
    return range_op.broadcast(running)
