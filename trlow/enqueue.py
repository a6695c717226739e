"""A stage becomes calls on a stream: the same code for eager steps, warm-up and capture.

Own kernels and copies are enqueued by the rank's thread. At a group of collectives every rank
thread stops at a barrier, the coordinator issues one group for all ranks into their streams, and
only after the group has ended does any rank go on: nothing that follows a collective can be
enqueued before it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trlow.communicator import Call
from trlow.errors import CaptureError, ForeignError, RankError, TrlowError
from trlow.nodes import add_child, is_capturing
from trlow.program import Stream
from trlow.range_op import Collective, FeedCopy, Launch, PeerCopy
from trlow.ranks import PeerFailedError
from trlow.transport import Neighbour

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from trlow.arena import Arena
    from trlow.communicator import Communicators
    from trlow.device import Events, Platform, Streams
    from trlow.feed import Feed
    from trlow.kernel import Kernels
    from trlow.marks import Tracer, Watch
    from trlow.program import External, Program, Stage
    from trlow.ranks import Status
    from trlow.recording import Recorder
    from trlow.transport import Transport

HOST_TO_DEVICE = 1  # cudaMemcpyKind


@dataclass(slots=True)
class Rank:
    """Everything that one rank owns on its device; used on that rank's own thread."""

    index: int
    device: int
    platform: Platform
    status: Status
    streams: Streams
    events: Events  # for order on the device
    step_events: Events  # for the bounded run-ahead of the host
    kernels: Kernels
    feed: Feed
    arena: Arena
    transport: Transport  # to the next rank
    watch: Watch | None = None  # beats around collectives, in captures
    tracer: Tracer | None = None  # stamps around stages, while a program is captured for a trace
    children: dict[External, int] = field(default_factory=dict)  # its graph, made executable
    recorder: Recorder | None = None  # who begins and ends captures; None: CUDA itself

    def mark(self, name: str, stream: int) -> None:
        """Leave a beat at this place of a capture, if anybody watches."""
        if self.watch is not None:
            self.watch.mark(name, stream)

    def launch(self, action: Launch, stream: int) -> None:
        """Enqueue one kernel with ranges as addresses."""
        base = self.arena.base
        values = [item if isinstance(item, int) else base + item.offset for item in action.args]
        self.kernels.launch(action.kernel, values, action.work, stream)

    def copy_feed(self, action: FeedCopy, stream: int) -> None:
        """Enqueue the copy of a whole pinned slot to its twin in the arena."""
        target = self.arena.base + action.range.offset
        self.platform.cudart.cudaMemcpyAsync(
            target, self.feed.source(action.slot), action.range.nbytes, HOST_TO_DEVICE, stream
        )

    def copy_to_next(self, action: PeerCopy, stream: int) -> None:
        """Enqueue a copy into the next rank's arena."""
        source = self.arena.base + action.source.offset
        self.transport.copy(action.range.offset, source, action.source.nbytes, stream)

    def drain(self) -> None:
        """Wait for all that was enqueued here, on another rank's device too."""
        try:
            self.streams.synchronize()
        finally:
            self.transport.drain()

    def record(self, key: object, stream: int) -> None:
        """Record the event named ``key``."""
        self.platform.cudart.cudaEventRecord(self.events[key], stream)

    def wait(self, stream: int, key: object) -> None:
        """Make ``stream`` wait for the event named ``key``."""
        self.platform.cudart.cudaStreamWaitEvent(stream, self.events[key], 0)


def introduce(ranks: Sequence[Rank]) -> None:
    """Tell each rank where the next one's arena is; a single rank has none."""
    for index, rank in enumerate(ranks):
        after = ranks[(index + 1) % len(ranks)]
        if after is not rank:
            rank.transport.next = Neighbour(after.device, after.arena.base)


@dataclass(frozen=True, slots=True)
class Group:
    """Collectives that are issued together, and the stage they belong to."""

    stage: str
    stream: Stream
    collectives: tuple[Collective, ...]


@dataclass(slots=True)
class Rendezvous:
    """Where all rank threads and the coordinator meet for each group of collectives."""

    parties: int  # ranks
    deadline_s: float
    groups: Sequence[Group]
    capturing: bool = False  # which error a failed group is
    _barrier: threading.Barrier = field(init=False)
    _stopped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.parties + 1, timeout=self.deadline_s)

    def meet(self) -> None:
        """A rank's side: arrive, and return when the group has ended."""
        self._wait()
        self._wait()

    def serve(self, communicators: Communicators, ranks: Sequence[Rank]) -> None:
        """The coordinator's side: every group in order. An error stops all ranks."""
        for group in self.groups:
            try:
                self._wait()
                communicators.group(calls(group, ranks))
                self._wait()
            except PeerFailedError:
                raise
            except BaseException as error:
                self.stop()
                raise self._failure(group, error) from error

    def _failure(self, group: Group, error: BaseException) -> TrlowError:
        op = group.collectives[0].kind
        message = f"a group of {len(group.collectives)} {op} failed: {error}"
        if self.capturing:
            return CaptureError(message, rank=None, stage=group.stage, op=op)
        return RankError(message, rank=None, step=None, stage=group.stage)

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._stopped:
                message = "a rank or the coordinator stopped before the collective"
                raise PeerFailedError(message) from None
            self._stopped = True  # only the first to run out of time says so
            message = f"not every rank came to a collective within {self.deadline_s:g} s"
            raise RankError(message, rank=None, step=None, stage=None) from None

    def stop(self) -> None:
        """Wake everybody who waits here or comes later."""
        self._stopped = True
        self._barrier.abort()


def calls(group: Group, ranks: Sequence[Rank]) -> Iterator[Call]:
    """One call per collective and rank, with every argument resolved."""
    for collective in group.collectives:
        for rank in ranks:
            base = rank.arena.base
            yield Call(
                rank.index,
                collective.kind,
                base + collective.range.offset,
                collective.range.count,
                collective.range.dtype.nccl_code,
                collective.op,
                collective.root,
                rank.streams[group.stream],
                None if collective.factor is None else base + collective.factor.offset,
            )


def groups_of(stages: Iterable[Stage], world_size: int) -> list[Group]:
    """The groups that ``stages`` issue in order; none when there is only one rank."""
    if world_size == 1:
        return []
    groups: list[Group] = []
    for stage in stages:
        for group in stage.groups():
            collectives = tuple(action for action in group if isinstance(action, Collective))
            if collectives:
                groups.append(Group(stage.name, stage.stream, collectives))
    return groups


def enqueue_stage(rank: Rank, stage: Stage, rendezvous: Rendezvous | None) -> None:
    """Enqueue everything of ``stage``. ``rendezvous`` is None when there is only one rank."""
    stream = rank.streams[stage.stream]
    rank.status.stage = stage.name
    meets = rendezvous is not None and "comm:0" in stage.all_resources
    if meets:
        rank.mark(f"before {stage.name}", stream)
    for group in stage.groups():
        action = group[0]
        if isinstance(action, Collective):
            rank.status.op = action.kind
            if any(one.joins for one in group if isinstance(one, Collective)):
                rank.transport.join(stream)
            if rendezvous is not None:
                rendezvous.meet()
        elif isinstance(action, Launch):
            rank.status.op = action.kernel
            rank.launch(action, stream)
        elif isinstance(action, PeerCopy):
            rank.status.op = "copy to the next rank"
            rank.copy_to_next(action, stream)
        else:
            rank.status.op = f"feed {action.slot}"
            rank.copy_feed(action, stream)
    if stage.external is not None:
        rank.status.op = "external"
        _enqueue_external(rank, stage, stream)
    if meets:
        rank.mark(f"after {stage.name}", stream)
    rank.status.op = None


def _enqueue_external(rank: Rank, stage: Stage, stream: int) -> None:
    external = stage.external
    if external is None:
        return
    if external.kind == "callback":
        external.body(rank.index, stream)  # type: ignore[operator]
        rank.platform.cudart.cudaSetDevice(rank.device)  # whatever the callback left current
        return
    graph: int = external.body[rank.index]  # type: ignore[index]
    if is_capturing(rank.platform, stream):
        add_child(rank.platform, stream, graph)
    else:
        rank.platform.cudart.cudaGraphLaunch(rank.children[external], stream)


def enqueue_phase(rank: Rank, program: Program, phase: int, rendezvous: Rendezvous | None) -> None:
    """Enqueue one step: fork from UPDATE, every stage behind its edges, join UPDATE."""
    stages = program.phases[phase]
    first_place = sum(len(before) for before in program.phases[:phase])
    edges = [edge for edge in program.edges() if edge.distance == 0 and edge.src[0] == phase]
    sources = {edge.src[1] for edge in edges}
    update = rank.streams[Stream.UPDATE]
    others = {stage.stream for stage in stages} - {Stream.UPDATE}
    used = [stream for stream in Stream if stream in others]
    rank.record("fork", update)
    for other in used:
        rank.wait(rank.streams[other], "fork")
    for index, stage in enumerate(stages):
        stream = rank.streams[stage.stream]
        for edge in edges:
            if edge.dst[1] == index:
                rank.wait(stream, ("stage", edge.src[1]))
        tracer = rank.tracer
        if tracer is not None:
            tracer.stamp(first_place + index, 0, stream)
        enqueue_stage(rank, stage, rendezvous)
        if tracer is not None:
            tracer.stamp(first_place + index, 1, stream)
        if index in sources:
            rank.record(("stage", index), stream)
    for other in used:
        rank.record(("join", other), rank.streams[other])
        rank.wait(update, ("join", other))
    rank.mark(f"end of {program.name}", update)
    if rank.tracer is not None:
        rank.tracer.next_row(update)


def stage_failure(rank: Rank, error: BaseException) -> BaseException:
    """``error`` of a rank's capture as a ``CaptureError`` that says where it happened."""
    if isinstance(error, (PeerFailedError, CaptureError)):
        return error
    if isinstance(error, ForeignError) and error.rank is None:
        error = error.with_rank(rank.index, rank.device)
    failure = CaptureError(
        f"capture failed: {type(error).__name__}: {error}",
        rank=rank.index,
        stage=rank.status.stage,
        op=rank.status.op,
    )
    failure.__cause__ = error
    return failure
