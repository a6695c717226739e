"""The program of a step: torch's work as external stages, collectives between them.

On a GPU a bucket is gathered by a stage of its own, which waits for an event inside of the
backward. The program does not see that order, so it derives none, and the bucket's all-reduce runs
while the backward goes on. Where weights may change early the step of a bucket's parameters comes
right behind its all-reduce, and COMPUTE does not say that it reads them. Everything else is derived
from byte ranges as always.

Where ranks copy, a bucket is sent instead, ranks meet once behind all of them, and whoever reads a
gradient adds what has been received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlow import range_op
from trlow.exchange import add, admit, receive, send
from trlow.program import External, Program, Stage, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.plan import MemoryPlan, Range
    from trlow.range_op import RangeOp
    from trlow.torch.course import Course
    from trlow.torch.cuda import CudaSide
    from trlow.torch.host import HostSide


@dataclass(frozen=True, slots=True)
class Ranges:
    """What the stages of a step read and write; the first five by bucket."""

    weights: tuple[Range, ...]
    gradients: tuple[Range, ...]
    inboxes: tuple[Range, ...]  # the peer's gradients; empty unless ranks copy, as the next
    direct: tuple[Range, ...]  # and those that it does not gather first
    masters: tuple[Range, ...]  # gradients as the optimizer reads them, if they travel otherwise
    loss: Range
    running: Range
    token: Range  # empty unless ranks copy

    @classmethod
    def of(cls, plan: MemoryPlan) -> Ranges:
        """Those of a module's plan."""
        numbers = range(len(plan.table.buckets))
        weights, gradients, inboxes, direct, masters = (
            tuple(plan.range(f"{kind}_BUCKET_{k}") for k in numbers) for kind in "WGPDH"
        )
        loss, running, token = map(plan.range, ("R_LOSS", "B_STATISTICS", "S_TOKEN"))
        return cls(weights, gradients, inboxes, direct, masters, loss, running, token)


def step_program(
    plan: MemoryPlan,
    sides: Sequence[CudaSide | HostSide],
    course: Course,
    statistics: str,
    *,
    last: bool,
) -> Program:
    """One step; without ``last`` it only adds its gradients and tells its loss."""
    ranges, early = Ranges.of(plan), course.early
    stages = [_compute(sides, ranges, early=early)]
    if last and course.copies:
        admission = admit(ranges.token, *ranges.inboxes, *ranges.direct)
        stages.insert(0, Stage("ADMIT", Stream.UPDATE, (admission,)))
    tail = [range_op.sum_all_reduce(ranges.loss)]
    if last and ranges.running.nbytes:
        tail.append(_statistics(ranges.running, statistics))
    for k, bucket in enumerate(ranges.gradients):
        at_end = k == len(ranges.gradients) - 1
        if sides[0].overlaps and bucket.nbytes:
            stages.append(_gather(sides, k, bucket))
        if last and course.copies:
            stages.append(_send(sides, k, ranges))
        if last and (at_end or not course.copies):
            # Loss and statistics are in one group of NCCL with the last one.
            ops = _reduce(ranges, k, tail if at_end else (), course)
            stages.append(Stage(f"COMM_{k}", Stream.UPDATE, ops))
        if last and early:
            stages.append(_update_early(sides, k, ranges, beside=not at_end))
    if not last:
        stages.append(Stage("LOSS", Stream.UPDATE, tuple(tail)))
    elif not early:
        stages.append(_update(sides, ranges))
    return Program.single("step" if last else "micro-step", tuple(stages))


def _reduce(ranges: Ranges, k: int, more: Sequence[RangeOp], course: Course) -> tuple[RangeOp, ...]:
    """One bucket, or where ranks copy all of them; ``more`` goes along."""
    if not course.copies:
        return (range_op.sum_all_reduce(ranges.gradients[k]), *more)
    arrived = receive(ranges.token, *ranges.inboxes, *ranges.direct)
    sums = () if course.adds else map(add, ranges.gradients, ranges.inboxes)
    return (arrived, *more, *sums)


def _send(sides: Sequence[CudaSide | HostSide], k: int, ranges: Ranges) -> Stage:
    """One bucket to the peer's inbox: what is gathered, and then what is sent directly.

    Those copies are torch's side's, which `exchange` cannot check: they come behind ADMIT and ahead
    of the receiving stage, as their bytes do.
    """

    def body(rank: int, stream: int) -> None:
        sides[rank].send(k, stream)  # type: ignore[union-attr]

    direct = ranges.direct[k]
    work = External("callback", (), (direct,), body) if direct.nbytes else None
    gathered = send(ranges.inboxes[k], ranges.gradients[k])
    return Stage(f"SEND_{k}", Stream.UPDATE, (gathered,), work)


def _compute(sides: Sequence[CudaSide | HostSide], ranges: Ranges, *, early: bool) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].compute(stream)

    reads = () if early else ranges.weights
    written = (ranges.loss, *((ranges.running,) if ranges.running.nbytes else ()))
    also = () if sides[0].overlaps else ranges.gradients
    work = External("callback", reads, (*written, *also), body)
    return Stage("COMPUTE", Stream.COMP_1, (), work)


def _gather(sides: Sequence[CudaSide | HostSide], k: int, bucket: Range) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].gather(k, stream)  # type: ignore[union-attr]

    return Stage(f"GATHER_{k}", Stream.COMP_2, (), External("callback", (), (bucket,), body))


def _update_early(
    sides: Sequence[CudaSide | HostSide], k: int, ranges: Ranges, *, beside: bool
) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].apply_early(k, stream, beside=beside)  # type: ignore[union-attr]

    bucket = ranges.gradients[k]
    counts = ranges.weights[:1] if k else ()  # the step of bucket 0 counts it for all
    changed = (ranges.weights[k], ranges.masters[k], bucket)
    work = External("callback", (bucket, *counts), changed, body)
    # With nothing beside it the last one stays on the stream of its all-reduce.
    stream = Stream.TRANS if beside else Stream.UPDATE
    return Stage(f"OPTIMIZER_{k}", stream, (), work)


def _update(sides: Sequence[CudaSide | HostSide], ranges: Ranges) -> Stage:
    def body(rank: int, stream: int) -> None:
        sides[rank].apply(stream)

    writes = (*ranges.weights, *ranges.gradients, *ranges.masters)  # clipping is in place
    reads = (*ranges.gradients, *ranges.inboxes, *ranges.direct)
    work = External("callback", reads, writes, body)
    return Stage("OPTIMIZER", Stream.UPDATE, (), work)


def _statistics(running: Range, how: str) -> RangeOp:
    if how == "mean":
        return range_op.mean_all_reduce(running, strategy="avg")
    return range_op.broadcast(running)
