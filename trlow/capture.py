"""A program becomes graphs: coordinated over all ranks, and all or nothing.

Each rank's thread begins (thread-local mode), enqueues and ends its own capture. Only when all have
ended does any rank instantiate, and every graph is uploaded before the first launch. If anything
raises, every begun capture is ended and every partial graph destroyed before the first error is
raised with its rank, stage and op.
"""

from __future__ import annotations

from collections import Counter
from ctypes import byref, c_void_p
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trlow.enqueue import enqueue_phase, enqueue_stage, groups_of, stage_failure
from trlow.errors import CaptureError, ForeignError
from trlow.memsets import replace_memsets
from trlow.nodes import INVALIDATED, NOT_CAPTURING, capture_status, nodes_of
from trlow.program import Stream
from trlow.range_op import FeedCopy, Launch, PeerCopy
from trlow.ranks import PeerFailedError
from trlow.recording import PlainRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from trlow.enqueue import Group, Rank, Rendezvous
    from trlow.program import Program, Stage

CHILD_GRAPH = 4  # cudaGraphNodeTypeGraph
# cudaGraphNodeType -> name, as driver_types.h numbers them
NODE_TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty"} | {
    6: "wait_event",
    7: "event_record",
    10: "mem_alloc",
    11: "mem_free",
    13: "conditional",
}
REFUSED = ("mem_alloc", "mem_free", "conditional")  # not allowed in an external child graph


@dataclass(slots=True)
class Section:
    """What becomes one graph: a whole phase (fused) or one stage (staged)."""

    key: Hashable
    stream: Stream
    stages: tuple[Stage, ...]
    enqueue: Callable[[Rank, Rendezvous | None], None]


@dataclass(slots=True)
class Graphs:
    """The graphs of one rank by section. Made, launched and destroyed on the rank's thread."""

    graphs: dict[Hashable, int] = field(default_factory=dict)  # cudaGraph_t
    execs: dict[Hashable, int] = field(default_factory=dict)  # cudaGraphExec_t
    nodes: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)  # node types in order
    beats: list[list[int]] = field(default_factory=list)  # places of the watch that they take
    releases: list[Callable[[], None]] = field(default_factory=list)  # called when they go

    def take(self, other: Graphs) -> None:
        """Own what ``other`` owned, which then owns nothing."""
        self.graphs.update(other.graphs)
        self.execs.update(other.execs)
        self.nodes.update(other.nodes)
        self.beats += other.beats
        self.releases += other.releases
        other.graphs, other.execs, other.nodes, other.beats, other.releases = {}, {}, {}, [], []

    def close(self, rank: Rank) -> None:
        """Destroy everything; goes on after a failure and raises the first."""
        self.nodes.clear()
        while self.beats:
            taken = self.beats.pop()
            if rank.watch is not None:
                rank.watch.give_back(taken)
        cudart = rank.platform.cudart
        ends: list[Callable[[], object]] = [
            *(partial(cudart.cudaGraphExecDestroy, handle) for handle in self.execs.values()),
            *(partial(cudart.cudaGraphDestroy, handle) for handle in self.graphs.values()),
            *self.releases,
        ]
        self.graphs, self.execs, self.releases = {}, {}, []
        first: Exception | None = None
        for end in ends:
            try:
                end()
            except Exception as error:  # noqa: BLE001  of others' releases as well
                first = first or error
        if first is not None:
            raise first


def close_of(graphs: Sequence[Graphs], rank: Rank) -> None:
    """Destroy a rank's of these."""
    graphs[rank.index].close(rank)


def sections_of(program: Program, mode: str) -> list[Section]:
    """What is captured, in order; equal stages of a staged program are captured once."""
    if mode == "fused":
        return [
            Section(phase, Stream.UPDATE, stages, _phase_enqueuer(program, phase))
            for phase, stages in enumerate(program.phases)
        ]
    found: dict[Hashable, Section] = {}
    for stages in program.phases:
        for stage in stages:
            key = stage_key(stage)
            found.setdefault(key, Section(key, stage.stream, (stage,), _stage_enqueuer(stage)))
    return list(found.values())


def stage_key(stage: Stage) -> Hashable:
    """What makes two stages the same graph: stream and work, not the name or the variant."""
    return stage.stream, stage.ops, stage.external


def _phase_enqueuer(program: Program, phase: int) -> Callable[[Rank, Rendezvous | None], None]:
    return lambda rank, rendezvous: enqueue_phase(rank, program, phase, rendezvous)


def _stage_enqueuer(stage: Stage) -> Callable[[Rank, Rendezvous | None], None]:
    def enqueue(rank: Rank, rendezvous: Rendezvous | None) -> None:
        enqueue_stage(rank, stage, rendezvous)
        rank.transport.join(rank.streams[stage.stream])  # a capture ends with all that it began

    return enqueue


def groups_in(sections: Sequence[Section], world_size: int) -> list[Group]:
    """Every group of collectives that capturing ``sections`` issues, in order."""
    stages = [stage for section in sections for stage in section.stages]
    return groups_of(stages, world_size)


def capture_rank(
    rank: Rank, sections: Sequence[Section], rendezvous: Rendezvous | None, graphs: Graphs
) -> None:
    """Capture every section on the calling rank's thread into ``graphs``.

    Raises ``CaptureError`` (or ``PeerFailedError``) with no capture left open.
    """
    try:
        for section in sections:
            _capture_section(rank, section, rendezvous, graphs)
    except BaseException as error:
        if rendezvous is not None:
            rendezvous.stop()
        raise stage_failure(rank, error) from error


def _capture_section(
    rank: Rank, section: Section, rendezvous: Rendezvous | None, graphs: Graphs
) -> None:
    recorder = rank.recorder or PlainRecorder(rank.platform)
    stream = rank.streams[section.stream]
    rank.status.stage = section.stages[0].name if len(section.stages) == 1 else None
    try:
        recorder.begin(stream)
        if rank.watch is not None:
            graphs.beats.append(rank.watch.begin_capture())
        section.enqueue(rank, rendezvous)
        graph, release = recorder.end(stream)
    except BaseException as error:
        spoiled = _abandon(rank, stream)
        try:
            recorder.forget(stream)
        except Exception as second:  # noqa: BLE001  what failed first says why
            error.add_note(f"while forgetting the capture: {second}")
        if spoiled and isinstance(error, PeerFailedError):
            message = "something else used this device during its capture and invalidated it"
            raise CaptureError(
                message, rank=rank.index, stage=rank.status.stage, op=rank.status.op
            ) from error
        raise
    graphs.graphs[section.key] = graph
    graphs.releases.append(release)
    replace_memsets(rank.platform, rank.kernels, graph)
    graphs.nodes[section.key] = node_types(rank, graph)


def _abandon(rank: Rank, stream: int) -> bool:
    """End a capture that failed; whether it had been invalidated.

    The end is owed even after an invalidation, and may itself fail. Ends when the stream captures
    no more; an end that failed before it ran is tried once more.
    """
    cudart = rank.platform.cudart
    spoiled = False
    for _ in range(2):
        graph = c_void_p()
        try:
            status = capture_status(rank.platform, stream)
            if status == NOT_CAPTURING:
                return spoiled
            spoiled = spoiled or status == INVALIDATED
            cudart.cudaStreamEndCapture(stream, byref(graph))
        except ForeignError:
            continue  # an invalidated capture ends with an error; the cause is being raised
        if graph.value:
            cudart.cudaGraphDestroy(graph.value)
    return spoiled


def node_types(rank: Rank, graph: int) -> tuple[str, ...]:
    """The types of a graph's nodes, child graphs opened in place."""
    found: list[str] = []
    for node, code in nodes_of(rank.platform, graph):
        found.append(NODE_TYPES.get(code, f"type {code}"))
        if code == CHILD_GRAPH:
            child = c_void_p()
            rank.platform.cudart.cudaGraphChildGraphNodeGetGraph(node, byref(child))
            found.extend(node_types(rank, child.value or 0))
    return tuple(found)


def adopt_children(rank: Rank, program: Program) -> None:
    """Instantiate the ready-made graphs of external stages, so that they can be launched.

    Raises ``CaptureError`` for a graph with nodes that a child graph must not have.
    """
    for stages in program.phases:
        for stage in stages:
            if stage.external is None or stage.external.kind != "graph":
                continue
            if stage.external in rank.children:
                continue
            rank.status.stage, rank.status.op = stage.name, "external"
            graphs: tuple[int, ...] = stage.external.body  # type: ignore[assignment]
            if rank.index >= len(graphs):
                message = f"an external stage has {len(graphs)} graphs, one for each rank is needed"
                raise CaptureError(message, rank=rank.index, stage=stage.name, op="external")
            graph = graphs[rank.index]
            refused = sorted({kind for kind in node_types(rank, graph) if kind in REFUSED})
            if refused:
                message = f"a child graph must not hold {', '.join(refused)} nodes"
                raise CaptureError(message, rank=rank.index, stage=stage.name, op="external")
            executable = c_void_p()
            rank.platform.cudart.cudaGraphInstantiate(byref(executable), graph, 0)
            rank.children[stage.external] = executable.value or 0


def release_children(rank: Rank) -> None:
    """Destroy what ``adopt_children`` made; the graphs themselves stay their owner's."""
    while rank.children:
        _, executable = rank.children.popitem()
        rank.platform.cudart.cudaGraphExecDestroy(executable)


def instantiate_rank(rank: Rank, graphs: Graphs) -> None:
    """Instantiate and upload every graph of one rank; all ranks have ended their captures."""
    cudart = rank.platform.cudart
    for key, graph in graphs.graphs.items():
        executable = c_void_p()
        cudart.cudaGraphInstantiate(byref(executable), graph, 0)
        graphs.execs[key] = executable.value or 0
    for executable_handle in graphs.execs.values():
        cudart.cudaGraphUpload(executable_handle, rank.streams[Stream.UPDATE])
    cudart.cudaStreamSynchronize(rank.streams[Stream.UPDATE])


def check_graphs(sections: Sequence[Section], captured: Sequence[Graphs]) -> None:
    """Graphs hold what was enqueued, and are the same on all ranks. Raises ``CaptureError``.

    What a callback enqueues is its own affair: compiled code may take other kernels on each device.
    Collectives are the same on all ranks in any case, since they are issued for all at once.
    """
    copies = (FeedCopy, PeerCopy) if len(captured) > 1 else FeedCopy
    for section in sections:
        actions = [action for stage in section.stages for action in stage.actions]
        wanted = {
            "kernel": sum(isinstance(action, Launch) for action in actions),
            "memcpy": sum(isinstance(action, copies) for action in actions),
        }
        name = section.stages[0].name if len(section.stages) == 1 else "the whole step"
        first = Counter(captured[0].nodes[section.key])
        for kind, count in wanted.items():
            if first[kind] < count:
                message = f"the graph of {name} has {first[kind]} {kind} nodes, wanted {count}"
                raise CaptureError(message, rank=0, stage=name, op=None)
        if any(stage.external and stage.external.kind == "callback" for stage in section.stages):
            continue
        for rank, graphs in enumerate(captured):
            if graphs.nodes[section.key] != captured[0].nodes[section.key]:
                other = Counter(graphs.nodes[section.key])
                message = f"the graph of {name} differs from rank 0's: {other} against {first}"
                raise CaptureError(message, rank=rank, stage=name, op=None)
