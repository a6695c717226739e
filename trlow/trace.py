"""When every stage of a program ran, on its stream and rank, by the devices' own clocks.

A traced program is the fused one with a stamp before and behind each stage, captured apart and
destroyed afterwards; everything persistent is put back. The zero of each GPU's clock is its own, so
ranks are aligned on the ends of their collectives, which end together but for some microseconds;
offsets between ranks below that mean nothing, durations and overlaps on one rank do.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.errors import UsageError
from trlow.marks import Tracer
from trlow.program import Program, Stage, Stream
from trlow.range_op import Collective, RangeOp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from trlow.enqueue import Rank
    from trlow.launching import Fill
    from trlow.replay import Replay
    from trlow.runtime import Runtime

NS_PER_US = 1000.0
FEWEST_STEPS = 5  # that are worth timing


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one step on one rank; times in µs from the first start on any rank."""

    rank: int
    step: int
    stage: str
    stream: str
    start_us: float
    end_us: float

    def overlap_us(self, other: Span) -> float:
        """How long both ran at once."""
        return max(0.0, min(self.end_us, other.end_us) - max(self.start_us, other.start_us))


@dataclass(frozen=True, slots=True)
class Trace:
    """Every stage of some steps."""

    program: str
    spans: tuple[Span, ...]

    def overlap_us(self, one: str, other: str) -> float:
        """Median over ranks and steps of how long two stages ran at once."""
        places: dict[tuple[int, int], dict[str, Span]] = {}
        for span in self.spans:
            places.setdefault((span.rank, span.step), {})[span.stage] = span
        both = [found for found in places.values() if one in found and other in found]
        if not both:
            raise UsageError(f"no step has both {one} and {other}")
        return statistics.median(found[one].overlap_us(found[other]) for found in both)

    def to_chrome(self) -> str:
        """JSON in Chrome's trace event format, which Perfetto reads.

        A process is a rank, a thread a stream; complete events ("X") with times in µs.
        """
        streams = sorted({span.stream for span in self.spans})
        events: list[dict[str, Any]] = []
        for rank in sorted({span.rank for span in self.spans}):
            name = {"name": f"rank {rank}"}
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": name})
            events += [
                {
                    "ph": "M",
                    "pid": rank,
                    "tid": tid,
                    "name": "thread_name",
                    "args": {"name": stream},
                }
                for tid, stream in enumerate(streams)
            ]
        events += [
            {
                "ph": "X",
                "pid": span.rank,
                "tid": streams.index(span.stream),
                "name": span.stage,
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": {"step": span.step},
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": events, "otherData": {"program": self.program}})


@dataclass(frozen=True, slots=True)
class Exposed:
    """What communication adds to a step: µs as the median, least and most over rounds."""

    us: float
    low_us: float
    high_us: float
    rounds: int
    steps: int  # of each run

    @property
    def within_noise(self) -> bool:
        """Whether the rounds do not even agree on a sign."""
        return self.low_us <= 0 <= self.high_us


def trace(
    runtime: Runtime,
    program: Program,
    steps: int,
    fill: Fill | None = None,
    *,
    variant: str | None = None,
) -> Trace:
    """Run ``steps`` steps with stamps on copies of everything persistent."""
    if steps < 1:
        raise UsageError(f"a trace needs at least one step, got {steps}")
    with preserved(runtime):
        stamps = stamped(runtime, program, steps, fill, variant=variant)
    ends = [index for index, stage in _places(program) if _is_collective(stage)]
    offsets = [_offset(stamps[0], own, ends) for own in stamps]
    zero = min(_first(own) - offset for own, offset in zip(stamps, offsets, strict=True))
    spans = tuple(
        span
        for rank, (own, offset) in enumerate(zip(stamps, offsets, strict=True))
        for span in _spans(program, rank, own, offset + zero)
    )
    return Trace(program.name, spans)


def _places(program: Program) -> list[tuple[int, Stage]]:
    return list(enumerate(stage for stages in program.phases for stage in stages))


def _is_collective(stage: Stage) -> bool:
    return any(isinstance(action, Collective) for action in stage.actions)


def _first(stamps: NDArray[np.int64]) -> int:
    return int(stamps[stamps > 0].min())


def _offset(reference: NDArray[np.int64], own: NDArray[np.int64], collectives: list[int]) -> int:
    """Nanoseconds by which a rank's clock is ahead of rank 0's: its collectives end so later."""
    differences = [
        int(own[row, place, 1] - reference[row, place, 1])
        for row in range(len(own))
        for place in collectives
        if own[row, place, 1] and reference[row, place, 1]
    ]
    return round(statistics.median(differences)) if differences else 0


def _spans(program: Program, rank: int, stamps: NDArray[np.int64], zero: int) -> Iterator[Span]:
    for step, row in enumerate(stamps):
        for place, stage in _places(program):
            start, end = (int(value) for value in row[place])
            if start and end:
                times = ((start - zero) / NS_PER_US, (end - zero) / NS_PER_US)
                yield Span(rank, step, stage.name, stage.stream.name, *times)


def without_communication(program: Program) -> Program:
    """The same stages and edges without their collectives; stages left empty disappear."""

    def silent(stage: Stage) -> Stage:
        ops = tuple(
            RangeOp(op.kind, op.reads, op.writes, tuple(_silent_actions(op))) for op in stage.ops
        )
        return Stage(stage.name, stage.stream, ops, stage.external, stage.resources)

    phases = tuple(tuple(silent(stage) for stage in stages) for stages in program.phases)
    return Program(f"{program.name} without communication", phases)


def _silent_actions(op: RangeOp) -> Iterator[Any]:
    return (action for action in op.actions if not isinstance(action, Collective))


def exposed_comm(
    runtime: Runtime,
    program: Program,
    most_steps: int,
    fill: Fill | None = None,
    *,
    rounds: int = 5,
    variant: str | None = None,
    run_s: float = math.inf,
) -> Exposed:
    """What communication adds to a fused step, by rounds with and without collectives in turn.

    A run takes about ``run_s`` seconds, but from 5 to ``most_steps`` steps; without ``run_s`` it
    takes ``most_steps``. Both runs of a round count the start and the end, so that cancels.
    Persistent memory is put back.
    """
    pair = (program, without_communication(program))
    with preserved(runtime):
        replays = [runtime.capture(each, "fused", variant=variant) for each in pair]
        steps = most_steps
        if run_s < math.inf:
            few = min(FEWEST_STEPS, most_steps)
            _run_s(replays[0], few, fill)  # warms caches and clocks
            step_s = _run_s(replays[0], few, fill) / few
            steps = max(few, min(most_steps, round(run_s / step_s)))
        for replay in replays:  # so does this, for both
            _run_s(replay, steps, fill)
        differences = []
        for _ in range(rounds):
            with_it, without_it = (_run_s(replay, steps, fill) for replay in replays)
            differences.append((with_it - without_it) / steps * 1e6)
        for replay in replays:
            runtime.release(replay)
    return Exposed(
        statistics.median(differences), min(differences), max(differences), rounds, steps
    )


def exposed_comm_us(
    runtime: Runtime,
    program: Program,
    steps: int,
    fill: Fill | None = None,
    *,
    rounds: int = 5,
    variant: str | None = None,
) -> float:
    """µs that communication adds to a step, measured in runs of ``steps`` steps."""
    return exposed_comm(runtime, program, steps, fill, rounds=rounds, variant=variant).us


def _run_s(replay: Replay, steps: int, fill: Fill | None) -> float:
    begun = time.perf_counter()
    replay.run(steps, fill)
    return time.perf_counter() - begun


@contextmanager
def preserved(runtime: Runtime) -> Iterator[None]:
    """Put everything persistent on every rank back after the body."""
    ranges = runtime.plan.persistent_ranges()
    stacks = [ExitStack() for _ in runtime.devices]
    try:
        runtime.together(lambda rank: stacks[rank.index].enter_context(rank.arena.saved(ranges)))
        yield
    finally:
        if not runtime.dead:
            runtime.together(lambda rank: stacks[rank.index].close())


def stamped(
    runtime: Runtime,
    program: Program,
    steps: int,
    fill: Fill | None = None,
    *,
    variant: str | None = None,
) -> list[NDArray[np.int64]]:
    """Run ``steps`` fused steps with a stamp before and behind each stage.

    Returns per rank the stamps in ns on its own clock, shape (steps, stages of all phases, 2); 0
    for stages of a phase that the step is not.
    """
    places = len(_places(program))
    with ExitStack() as stack:
        stack.callback(_stop_all_tracing, runtime)
        tracers = runtime.together(lambda rank: _start_tracing(rank, places, steps))
        replay = runtime.capture(program, "fused", variant=variant)
        stack.callback(runtime.release, replay)
        replay.run(steps, fill)
        return runtime.together(lambda rank: tracers[rank.index].read())


def _start_tracing(rank: Rank, places: int, rows: int) -> Tracer:
    stream = rank.streams[Stream.UPDATE]
    rank.tracer = Tracer(rank.platform, rank.kernels, stream, places, rows)
    return rank.tracer


def _stop_all_tracing(runtime: Runtime) -> None:
    if not runtime.dead:
        runtime.together(_stop_tracing)


def _stop_tracing(rank: Rank) -> None:
    tracer, rank.tracer = rank.tracer, None
    if tracer is not None:
        tracer.close()
