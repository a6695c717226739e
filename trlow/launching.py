"""What one rank launches: its part of the loop, with everything resolved before it starts.

Per step a rank's thread waits for the step two back (so that its pinned slot may be rewritten),
lets the host write the next batch into that slot, and launches. Nothing else happens there: no
allocation, no drain, no event creation, no first use of a kernel. Fused replays one graph a step;
staged replays one graph a stage, ordered by events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from trlow.capture import stage_key
from trlow.program import Stream
from trlow.range_op import FeedCopy
from trlow.ranks import PeerFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from trlow.capture import Graphs
    from trlow.enqueue import Rank
    from trlow.feed import FeedSlot
    from trlow.program import Edge, Program

# fill(rank, step, slot) writes the inputs of ``step`` into ``slot``; it runs on the rank's thread
Fill: TypeAlias = "Callable[[int, int, FeedSlot], None]"
Call: TypeAlias = "Callable[[], Any]"  # of C, its arguments converted already

RUN_AHEAD = 2  # steps that the host may be ahead of the device


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
    _queries: tuple[tuple[Call, ...], ...] = field(init=False)  # and whether it is there
    _records: tuple[tuple[Call, ...], ...] = field(init=False)  # by parity, of ends
    # by phase: name and calls of each launch
    _launches: tuple[tuple[tuple[str, tuple[Call, ...]], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the calls."""
        prepare = self.rank.platform.cudart.prepare
        self._waits = tuple(
            tuple(prepare("cudaEventSynchronize", event) for event, _ in end) for end in self.ends
        )
        self._queries = tuple(
            tuple(prepare("cudaEventQuery", event) for event, _ in end) for end in self.ends
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

    def is_done(self, parity: int) -> bool:
        """Whether the newest step of this parity is. From any thread.

        That something is not ready stays on the thread as its last error, for others to come upon.
        """
        done = not any(query() for query in self._queries[parity])
        if not done:
            self.rank.platform.cudart.cudaGetLastError()
        return done

    def launch(self, step: int, behind: Sequence[Call] = ()) -> None:
        """Launch one step, the ``step``-th since the run began, and mark the end of it all.

        ``behind`` are calls that enqueue on UPDATE; a fused step is complete ahead of them.
        """
        status = self.rank.status
        for name, calls in self._launches[step % len(self._launches)]:
            status.stage = name
            for call in calls:
                call()
        for call in behind:
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
