"""Warm up before capture, in two parts, changing nothing that is persistent.

First every rank loads and touches every kernel, and runs its external stages, with no collective in
flight: the first launch on a device is a load, and cold compute while a peer's collective spins
deadlocks. Then, after a barrier, each distinct collective runs once, eagerly, at its real size:
connections and NCCL's own kernels must exist before capture.

Own kernels warm with every extent 0, so they write nothing. What external stages and collectives
write to persistent ranges is saved before and put back after. Before an eager step everything is,
since there the caller's data is in place already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlow.enqueue import enqueue_stage
from trlow.exchange import inboxes_of
from trlow.memsets import CLEAR
from trlow.program import Program, Stage, Stream
from trlow.range_op import Collective, Launch, RangeOp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trlow.enqueue import Rank, Rendezvous
    from trlow.plan import MemoryPlan, Range


def kernels_of(program: Program) -> tuple[str, ...]:
    """Every kernel that ``program`` launches, each once."""
    names = {
        action.kernel
        for stages in program.phases
        for stage in stages
        for action in stage.actions
        if isinstance(action, Launch)
    }
    return tuple(sorted(names))


def collective_stages(program: Program) -> tuple[Stage, ...]:
    """One stage per distinct group of collectives, holding the collectives alone."""
    found: dict[object, Stage] = {}
    for stages in program.phases:
        for stage in stages:
            for group in stage.groups():
                if isinstance(group[0], Collective):
                    calls = [action for action in group if isinstance(action, Collective)]
                    ranges = tuple(call.range for call in calls)
                    factors = tuple(call.factor for call in calls if call.factor is not None)
                    op = RangeOp("warm-up", (*ranges, *factors), ranges, group)
                    found.setdefault(
                        (stage.stream, group), Stage(f"warm {stage.name}", stage.stream, (op,))
                    )
    return tuple(found.values())


def kept_ranges(plan: MemoryPlan, stages: Iterable[Stage], *, keep_all: bool) -> tuple[Range, ...]:
    """What warming ``stages`` writes and has to be put back: what is persistent, or all of it."""
    persistent = plan.persistent_ranges()
    kept = {
        item
        for stage in stages
        for item in stage.writes
        if keep_all or any(item.overlaps(other) for other in persistent)
    }
    return tuple(sorted(kept, key=lambda item: (item.offset, item.nbytes)))


def warm_compute(rank: Rank, program: Program, *, keep_all: bool) -> None:
    """Part one on one rank: kernels loaded and launched with nothing to do, externals run."""
    stages = [stage for phase in program.phases for stage in phase]
    rank.kernels.load((*kernels_of(program), CLEAR))
    for inbox in inboxes_of(op for stage in stages for op in stage.ops):
        rank.transport.prepare(inbox.offset, inbox.nbytes)
    rank.kernels.warm(CLEAR, rank.arena.base, rank.streams[Stream.UPDATE])
    for stage in stages:
        rank.status.stage = stage.name
        for action in stage.actions:
            if isinstance(action, Launch):
                rank.kernels.warm(action.kernel, rank.arena.base, rank.streams[stage.stream])
    rank.streams.synchronize()
    externals = [stage for stage in stages if stage.external is not None]
    with rank.arena.saved(kept_ranges(rank.arena.plan, externals, keep_all=keep_all)):
        for stage in externals:
            enqueue_stage(rank, Stage(stage.name, stage.stream, external=stage.external), None)
            rank.transport.join(rank.streams[stage.stream])
        rank.streams.synchronize()


def warm_collectives(
    rank: Rank, stages: tuple[Stage, ...], rendezvous: Rendezvous | None, *, keep_all: bool
) -> None:
    """Part two on one rank: each group of collectives once, all ranks together."""
    with rank.arena.saved(kept_ranges(rank.arena.plan, stages, keep_all=keep_all)):
        for stage in stages:
            enqueue_stage(rank, stage, rendezvous)
        rank.streams.synchronize()
