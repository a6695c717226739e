"""The loop: one thread per rank that only launches graphs.

Per step a rank's thread waits for the step two back (so that its pinned slot may be rewritten),
lets the host write the next batch into that slot, and launches. Nothing else happens there: no
allocation, no drain, no event creation, no first use of a kernel. Fused replays one graph a step;
staged replays one graph a stage, ordered by events.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from trlow.binding.clib import counting
from trlow.capture import stage_key
from trlow.errors import RankError, UsageError
from trlow.program import Stream
from trlow.range_op import FeedCopy
from trlow.ranks import PeerFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from trlow.capture import Graphs
    from trlow.enqueue import Rank
    from trlow.feed import FeedSlot
    from trlow.program import Edge, Program

# fill(rank, step, slot) writes the inputs of ``step`` into ``slot``; it runs on the rank's thread
Fill: TypeAlias = "Callable[[int, int, FeedSlot], None]"
# Team.together: runs a function on every rank's thread, returns the results in rank order
Together: TypeAlias = "Callable[..., list[Any]]"
Call: TypeAlias = "Callable[[], Any]"  # of C, its arguments converted already

RUN_AHEAD = 2  # steps that the host may be ahead of the device
# What the binding floor may see of a rank's thread between two steps.
ALLOWED_CALLS = frozenset(
    {
        "cudaGraphLaunch",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaStreamWaitEvent",
        "trlowHostIssuerEnter",
        "trlowHostIssuerLeave",
    }
)
DRAINS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


@dataclass(frozen=True, slots=True)
class Launching:
    """One graph launch of a step with the events around it, all as handles."""

    name: str
    stream: int
    executable: int
    waits: tuple[int, ...]
    record: int | None

    def calls(self, prepare: Callable[..., Call]) -> tuple[Call, ...]:
        """The same as calls of the runtime whose ``prepare`` this is."""
        waits = (prepare("cudaStreamWaitEvent", self.stream, event, 0) for event in self.waits)
        launch = prepare("cudaGraphLaunch", self.executable, self.stream)
        if self.record is None:
            return (*waits, launch)
        return (*waits, launch, prepare("cudaEventRecord", self.record, self.stream))


@dataclass(slots=True)
class RankReplay:
    """One rank's prepared steps: everything that the loop needs, resolved before it starts.

    Ranks that sum together end their steps together, so their threads wake together, and each
    sleeps for what the other does under the interpreter's lock. Hence calls of C are prepared: to
    convert their arguments would be a fifth of that when fused, a third when staged.
    """

    rank: Rank
    graphs: Graphs
    phases: tuple[tuple[Launching, ...], ...]
    ends: tuple[tuple[tuple[int, int], ...], ...]  # per parity: (event, stream) recorded at the end
    slots: tuple[FeedSlot, ...] = ()  # by parity of the step
    _waits: tuple[tuple[Call, ...], ...] = field(init=False)  # by parity, for what ends recorded
    _records: tuple[tuple[Call, ...], ...] = field(init=False)  # by parity, of ends
    # by phase: name and calls of each launch
    _launches: tuple[tuple[tuple[str, tuple[Call, ...]], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the calls."""
        prepare = self.rank.platform.cudart.prepare
        self._waits = tuple(
            tuple(prepare("cudaEventSynchronize", event) for event, _ in end) for end in self.ends
        )
        self._records = tuple(
            tuple(prepare("cudaEventRecord", event, stream) for event, stream in end)
            for end in self.ends
        )
        self._launches = tuple(
            tuple((item.name, item.calls(prepare)) for item in phase) for phase in self.phases
        )

    def run(self, steps: int, fill: Fill | None, first_step: int) -> None:
        """Replay ``steps`` steps and wait for the last two. Runs on the rank's own thread."""
        self._loop(steps, fill, first_step)
        self.rank.status.stage = "end of run"
        self.drain(steps)

    def drain(self, steps: int) -> None:
        """Wait for the last of ``steps`` steps."""
        for parity in range(min(steps, RUN_AHEAD)):
            self.wait(parity)

    def wait(self, parity: int) -> None:
        """Wait for the newest step of this parity."""
        for wait in self._waits[parity]:
            wait()

    def launch(self, step: int) -> None:
        """Launch one step, the ``step``-th since the run began, and mark its end."""
        status = self.rank.status
        for name, calls in self._launches[step % len(self._launches)]:
            status.stage = name
            for call in calls:
                call()
        for record in self._records[step % RUN_AHEAD]:
            record()

    def prologue(self, fill: Fill, first_step: int) -> None:
        """Load the first batch; every later one is loaded by the step before it."""
        load_slot(self.rank, self.slots[0], fill, first_step)

    def _loop(self, steps: int, fill: Fill | None, first_step: int) -> None:
        # ``wait`` and ``launch`` written out: two calls less are a tenth of a fused step's Python.
        waits, launches, records = self._waits, self._launches, self._records
        index, status, phases = self.rank.index, self.rank.status, len(self._launches)
        for step in range(steps):
            parity, phase = step % RUN_AHEAD, launches[step % phases]
            status.step = first_step + step
            status.stage = None
            if status.stop:
                message = "told to stop"
                raise PeerFailedError(message)
            if step >= RUN_AHEAD:
                for wait in waits[parity]:
                    wait()
            if fill is not None and step + 1 < steps:
                status.stage = "fill of the next step"
                fill(index, first_step + step + 1, self.slots[(step + 1) % len(self.slots)])
            for name, calls in phase:
                status.stage = name
                for call in calls:
                    call()
            for record in records[parity]:
                record()


def load_slot(rank: Rank, slot: FeedSlot, fill: Fill, step: int) -> None:
    """Fill one pinned slot, copy it to the device and wait for the copy."""
    rank.status.step, rank.status.stage = step, "prologue"
    fill(rank.index, step, slot)
    stream = rank.streams[Stream.TRANS]
    rank.copy_feed(FeedCopy(slot.letter, rank.feed.span(slot.letter)), stream)
    rank.platform.cudart.cudaStreamSynchronize(stream)


def prepare_rank(
    rank: Rank, graphs: Graphs, program: Program, mode: str, slots: tuple[FeedSlot, ...]
) -> RankReplay:
    """Resolve handles and make every event of the loop. Runs on the rank's own thread."""
    if mode == "fused":
        update = rank.streams[Stream.UPDATE]
        phases: tuple[tuple[Launching, ...], ...] = tuple(
            (Launching(program.name, update, graphs.execs[phase], (), None),)
            for phase in range(len(program.phases))
        )
        streams = [Stream.UPDATE]
    else:
        phases = tuple(
            _staged_phase(rank, graphs, program, phase) for phase in range(len(program.phases))
        )
        used = {stage.stream for stages in program.phases for stage in stages}
        streams = [stream for stream in Stream if stream in used]
    ends = tuple(
        tuple((rank.step_events[parity, stream], rank.streams[stream]) for stream in streams)
        for parity in range(RUN_AHEAD)
    )
    return RankReplay(rank, graphs, phases, ends, slots)


def _staged_phase(
    rank: Rank, graphs: Graphs, program: Program, phase: int
) -> tuple[Launching, ...]:
    """One launch per stage; an edge is a wait for the event that its source records.

    An edge from the step before waits for what that step recorded: its source either belongs to
    another phase or comes later in the order, so it has not been recorded again yet.
    """
    edges: tuple[Edge, ...] = program.edges()
    sources = {edge.src for edge in edges}

    def event(place: Hashable) -> int:
        return rank.events["staged", program.name, place]

    launches = []
    for index, stage in enumerate(program.phases[phase]):
        here = (phase, index)
        launches.append(
            Launching(
                stage.name,
                rank.streams[stage.stream],
                graphs.execs[stage_key(stage)],
                tuple(event(edge.src) for edge in edges if edge.dst == here),
                event(here) if here in sources else None,
            )
        )
    return tuple(launches)


def check_steps(steps: int) -> None:
    """Raise ``UsageError`` for a number of steps that cannot be run."""
    if type(steps) is not int or steps < 0:
        message = f"steps must be an int and not negative, got {steps!r}"
        raise UsageError(message)


@dataclass(slots=True)
class CallCount:
    """What the binding floor saw of the replay loop, over all runs so far."""

    steps: int = 0
    ranks: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, steps: int, counted: Mapping[tuple[int, str], int], threads: set[int]) -> None:
        """Take one run's counts of the rank threads. Raises ``RankError`` for a call not allowed.

        Prologue and the wait for the last step are outside of the loop and were not counted.
        """
        self.steps += steps
        self.ranks = len(threads)
        for (thread, name), number in counted.items():
            if thread not in threads:
                continue
            self.calls[name] += number
            if name not in ALLOWED_CALLS and name not in DRAINS:
                message = f"the replay loop called {name} {number} times"
                raise RankError(message, rank=None, step=None, stage="audit")

    def per_step(self, *names: str) -> float:
        """Calls of ``names`` per rank and step."""
        total = sum(self.calls[name] for name in names)
        return total / (self.steps * self.ranks) if self.steps else 0.0


class Replay:
    """A captured program. ``run`` replays it; the runtime that captured it closes it.

    ``calls`` holds what the binding floor saw of the loop in every run with ``audit``.
    """

    def __init__(
        self, program: Program, mode: str, prepared: Sequence[RankReplay], together: Together
    ) -> None:
        """``together`` runs a function on every rank's thread (``Team.together``)."""
        self.program = program
        self.mode = mode
        self.calls = CallCount()
        self._prepared = tuple(prepared)
        self._together: Together | None = together

    def __len__(self) -> int:
        """The number of ranks."""
        return len(self._prepared)

    def prepared(self, rank: int) -> RankReplay:
        """What ``rank`` launches."""
        return self._prepared[rank]

    def together(self, function: Callable[[Rank], Any], **how: Any) -> list[Any]:
        """``Team.together``. Raises ``UsageError`` for a replay that is closed."""
        return self._open()(function, **how)

    def _open(self) -> Together:
        if self._together is None:
            message = f"the replay of {self.program.name!r} is closed; capture the program again"
            raise UsageError(message)
        return self._together

    @property
    def graphs_per_rank(self) -> int:
        """How many distinct executable graphs one rank launches."""
        return len({item.executable for phase in self._prepared[0].phases for item in phase})

    @property
    def first_graphs(self) -> Graphs:
        """What holds rank 0's graphs: the replay's own if fused, shared if staged."""
        return self._prepared[0].graphs

    @property
    def closed(self) -> bool:
        """Whether the graphs are gone, by ``close`` of the runtime or by a failure."""
        return self._together is None

    def run(
        self,
        steps: int,
        fill: Fill | None = None,
        *,
        first_step: int = 0,
        audit: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Replay ``steps`` steps on all ranks and return when every rank has finished them.

        ``fill(rank, step, slot)`` writes the inputs of a step; steps count from ``first_step`` and
        the first always takes phase 0. ``audit`` counts every C call of the loop and fails on one
        that does not belong there. ``progress(step)`` is called on the calling thread at most twice
        a second.

        Without ``fill`` a program with inputs runs on what its slots hold. Raises ``RankError``;
        after it all communicators are new and every replay of the runtime is closed.
        """
        check_steps(steps)
        together = self._open()
        prepared = self._prepared
        if fill is not None and not prepared[0].slots:
            message = f"{self.program.name!r} has no input to fill; it copies from no slot"
            raise UsageError(message)
        if steps and fill is not None:
            together(lambda rank: prepared[rank.index].prologue(fill, first_step))

        def loop(rank: Rank) -> int:
            prepared[rank.index].run(steps, fill, first_step)
            return threading.get_ident()

        if not audit:
            together(loop, launches=True, progress=progress)
            return
        with counting() as counted:
            threads = together(loop, launches=True, progress=progress)
        self.calls.add(steps, counted, set(threads))

    def detach(self) -> None:
        """Forget the graphs; their owner destroys them."""
        self._together = None
