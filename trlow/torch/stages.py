"""The program of a step: torch's work as external stages, collectives between them.

On a GPU a bucket is gathered by a stage of its own, which waits for an event inside of the
backward. The program does not see that order, so it derives none, and the bucket's all-reduce runs
while the backward goes on. Where weights may change early the step of a bucket's parameters comes
right behind its all-reduce, and COMPUTE does not say that it reads them. Everything else is derived
from byte ranges as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlow import range_op
from trlow.program import External, Program, Stage, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.plan import MemoryPlan, Range
    from trlow.range_op import RangeOp
    from trlow.torch.cuda import CudaSide
    from trlow.torch.host import HostSide

STATISTICS = ("mean", "rank0")  # what ranks do with running batch-norm statistics


def step_program(
    plan: MemoryPlan, sides: Sequence[CudaSide | HostSide], statistics: str, *, last: bool
) -> Program:
    """One step; without ``last`` it only adds its gradients and tells its loss."""
    number = len(plan.table.buckets)
    gradients = tuple(plan.range(f"G_BUCKET_{k}") for k in range(number))
    weights = tuple(plan.range(f"W_BUCKET_{k}") for k in range(number))
    masters = tuple(plan.range(f"H_BUCKET_{k}") for k in range(number))
    loss, running = plan.range("R_LOSS"), plan.range("B_STATISTICS")
    written = (loss, *((running,) if running.nbytes else ()))

    def external(
        body: Callable[[int, int], None], reads: tuple[Range, ...], writes: tuple[Range, ...]
    ) -> External:
        return External("callback", reads, writes, body)

    def compute(rank: int, stream: int) -> None:
        sides[rank].compute(stream)

    overlaps, early = sides[0].overlaps, sides[0].early
    also = () if overlaps else gradients
    reads = () if early else weights
    stages = [Stage("COMPUTE", Stream.COMP_1, (), external(compute, reads, (*written, *also)))]
    tail = [range_op.sum_all_reduce(loss)]
    if last and running.nbytes:
        tail.append(_statistics(running, statistics))
    for k, bucket in enumerate(gradients):
        if overlaps:
            stages.append(_gather(sides, k, bucket))
        if last:
            ops: tuple[RangeOp, ...] = (range_op.sum_all_reduce(bucket),)
            if k == number - 1:  # the loss and the statistics in one group with the last bucket
                ops += tuple(tail)
            stages.append(Stage(f"COMM_{k}", Stream.UPDATE, ops))
            if early:
                counts = weights[:1] if k else ()  # the step of bucket 0 counts it for all of them
                work = external(
                    _early(sides, k), (bucket, *counts), (weights[k], bucket, masters[k])
                )
                # With nothing beside it the last one stays on the stream of its all-reduce.
                stream = Stream.TRANS if k < number - 1 else Stream.UPDATE
                stages.append(Stage(f"OPTIMIZER_{k}", stream, (), work))
    if not last:
        stages.append(Stage("LOSS", Stream.UPDATE, tuple(tail)))
    elif not early:

        def apply(rank: int, stream: int) -> None:
            sides[rank].apply(stream)

        writes = (*weights, *gradients, *masters)  # clipping and unscaling are in place
        work = external(apply, gradients, writes)
        stages.append(Stage("OPTIMIZER", Stream.UPDATE, (), work))
    return Program.single("step" if last else "micro-step", tuple(stages))


def _gather(sides: Sequence[CudaSide | HostSide], k: int, bucket: Range) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].gather(k, stream)  # type: ignore[union-attr]

    return Stage(f"GATHER_{k}", Stream.COMP_2, (), External("callback", (), (bucket,), body))


def _early(sides: Sequence[CudaSide | HostSide], k: int) -> Callable[[int, int], None]:
    def body(rank: int, stream: int) -> None:
        sides[rank].apply_early(k, stream)  # type: ignore[union-attr]

    return body


def _statistics(running: Range, how: str) -> RangeOp:
    if how == "mean":
        return range_op.mean_all_reduce(running, strategy="avg")
    return range_op.broadcast(running)
