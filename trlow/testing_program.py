"""Invariants 13 to 16: what holds for every program, as checks that raise AssertionError.

The oracle here is the plainest there is: every pair of stages compared range by range, and paths
followed one node at a time. It shares no code with the sweep that `Program` uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from trlow.errors import PlanError
from trlow.plan import MemoryPlan
from trlow.program import Edge, Program, Stage, Stream
from trlow.range_op import Collective, sum_all_reduce
from trlow.testing_plan import require

__all__ = [
    "check_communication_stages",
    "check_concurrent_stages_share_nothing",
    "check_edges_equal_hazards",
    "check_overlap",
    "conflicting",
]


class _Node(NamedTuple):
    """A stage in one of some consecutive steps."""

    step: int
    phase: int
    place: int  # index in its phase
    stage: Stage


def conflicting(one: Stage, other: Stage) -> bool:
    """Tell whether one stage writes a byte that the other touches, or both have a resource."""
    if one.all_resources & other.all_resources:
        return True
    return any(w.overlaps(r) for w in one.writes for r in (*other.reads, *other.writes)) or any(
        w.overlaps(r) for w in other.writes for r in one.reads
    )


def check_edges_equal_hazards(program: Program) -> None:
    """13: edges and stream order give exactly the order of every conflicting pair, and no more.

    Checked by brute force over every two consecutive steps. A program with conflicts further apart
    that nothing orders must be refused instead.
    """
    count = len(program.phases)
    expected = {edge for phase in range(count) for edge in _hazards(program, phase)}
    hazards = program.hazards()
    require(len(set(hazards)) == len(hazards), "hazards has an edge twice")
    require(set(hazards) == expected, f"hazards and brute force: {set(hazards) ^ expected}")
    try:
        edges = program.edges()
    except PlanError as error:
        require(_races(program, expected), f"refused without a race: {error}")
        return
    require(not _races(program, expected), "steps further apart race, and it was not refused")
    require(set(edges) <= expected, f"edges without a hazard: {set(edges) - expected}")
    for phase in range(count):
        nodes = _steps(program, phase, 2)
        wanted = _reach(nodes, expected)
        require(_reach(nodes, edges) == wanted, f"edges order less than hazards, phase {phase}")
        for edge in edges:
            if edge.src[0] != phase:
                continue
            streams = [program.phases[p][i].stream for p, i in (edge.src, edge.dst)]
            require(streams[0] != streams[1], f"{edge} joins stages of one stream")
            fewer = _reach(nodes, [other for other in edges if other != edge])
            require(fewer != wanted, f"{edge} is implied by others")


def check_concurrent_stages_share_nothing(program: Program) -> None:
    """14: no two concurrent stages touch one byte unless both read, or share a resource."""
    for phase, stages in enumerate(program.phases):
        for j, other in enumerate(stages):
            for i, one in enumerate(stages[:j]):
                both = (program.concurrent(phase, i, j), program.concurrent(phase, j, i))
                require(both[0] == both[1], f"{one.name} and {other.name}: concurrent one way")
                if both[0]:
                    where = f"phase {phase}: {one.name} and {other.name}"
                    require(not conflicting(one, other), f"{where} are concurrent and conflict")
                    require(one.stream != other.stream, f"{where} share stream {one.stream}")
            require(not program.concurrent(phase, j, j), f"{other.name} is concurrent with itself")


def check_overlap(
    program: Program, communication: str = "DEEP_COMM", compute: str = "FIRST_BWD"
) -> None:
    """15: the deep all-reduce and the first layer's backward are concurrent where both exist."""
    for phase, stages in enumerate(program.phases):
        names = [stage.name for stage in stages]
        if communication in names and compute in names:
            i, j = names.index(communication), names.index(compute)
            require(
                program.concurrent(phase, i, j),
                f"phase {phase}: {communication} and {compute} wait for one another",
            )


def check_communication_stages(plan: MemoryPlan, frozen: Collection[str] = ()) -> None:
    """16: a stage for each bucket with something to reduce, and for no other.

    So with a frozen first layer its bucket's stage is still there for the gradients that are left:
    each trained gradient of a bucket lies in what its stage reduces.
    """
    reduced = {bucket.stage: bucket.range for bucket in plan.buckets(frozen)}
    stages = [
        Stage(
            spec.stage,
            Stream.UPDATE,
            (sum_all_reduce(*([reduced[spec.stage]] if spec.stage in reduced else [])),),
        )
        for spec in plan.table.buckets
    ]
    kept = {stage.name: stage for stage in Program.single("reduce", stages).phases[0]}
    for spec in plan.table.buckets:
        first, last = plan.table.index(spec.first), plan.table.index(spec.last)
        trained = [
            plan.range(t.name)
            for t in plan.tensors
            if first <= plan.table.index(t.region) <= last and t.name not in frozen
        ]
        require((spec.stage in kept) == bool(trained), f"{spec.stage} with {len(trained)} tensors")
        calls = kept[spec.stage].actions if trained else ()
        for slot in trained:
            whole = [c for c in calls if isinstance(c, Collective) and c.range.contains(slot)]
            require(len(whole) == 1, f"{spec.stage} reduces {slot} {len(whole)} times")


def _hazards(program: Program, phase: int) -> Iterable[Edge]:
    """Every conflicting pair, the earlier in this phase, within its step or to the next."""
    following = (phase + 1) % len(program.phases)
    for i, one in enumerate(program.phases[phase]):
        for j, other in enumerate(program.phases[phase]):
            if i < j and conflicting(one, other):
                yield Edge((phase, i), (phase, j), 0)
        for j, other in enumerate(program.phases[following]):
            if conflicting(one, other):
                yield Edge((phase, i), (following, j), 1)


def _steps(program: Program, phase: int, count: int) -> list[_Node]:
    """All stages of `count` consecutive steps in order, the first of which runs `phase`."""
    phases = [(phase + step) % len(program.phases) for step in range(count)]
    return [
        _Node(step, p, place, stage)
        for step, p in enumerate(phases)
        for place, stage in enumerate(program.phases[p])
    ]


def _reach(nodes: Sequence[_Node], edges: Collection[Edge]) -> list[set[int]]:
    """For each node, all that stream order and the edges make wait for it."""
    given = set(edges)
    reach: list[set[int]] = [set() for _ in nodes]
    for i in range(len(nodes) - 1, -1, -1):
        one = nodes[i]
        for j in range(i + 1, len(nodes)):
            other = nodes[j]
            edge = Edge((one.phase, one.place), (other.phase, other.place), other.step - one.step)
            if one.stage.stream == other.stage.stream or edge in given:
                reach[i] |= {j} | reach[j]
    return reach


def _races(program: Program, hazards: Collection[Edge]) -> bool:
    """Tell whether stages of any steps conflict unordered, over as many as can matter."""
    count = len(program.phases)
    for phase in range(count):
        nodes = _steps(program, phase, 2 * count + 1)
        reach = _reach(nodes, hazards)
        for i, one in enumerate(nodes):
            for j in range(i + 1, len(nodes)):
                if j not in reach[i] and conflicting(one.stage, nodes[j].stage):
                    return True
    return False
