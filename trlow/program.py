"""Stages on streams, and the order between them that their byte ranges imply.

Step k of a program runs `phases[k % len(phases)]`. Two stages conflict if one writes a byte that
the other touches, or if they share a resource; of two stages that conflict the later one waits,
within a step and from each step to the next. Nobody writes an edge, so none can be forgotten.
Stages of one stream run in order anyway, in one step and from step to step; `edges` is what is left
to order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from trlow.errors import PlanError
from trlow.exchange import check_order
from trlow.order import Access, Order
from trlow.plan import Range
from trlow.plan_text import short
from trlow.range_op import Action, Collective, FeedCopy, RangeOp

__all__ = ["Edge", "External", "Program", "Stage", "Stream"]

T = TypeVar("T")


def _members(where: str, given: object, kind: type[T]) -> tuple[T, ...]:
    """Return an iterable of one type as a tuple. A str is no iterable here."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise PlanError(
            f"{where} must be a tuple of {kind.__name__}, but is {short(given)}; write (x,) for a "
            "single one"
        )
    found = tuple(given)
    for one in found:
        if not isinstance(one, kind):
            raise PlanError(
                f"{where} must be a tuple of {kind.__name__}, but holds {short(one)}; put nothing "
                "else there"
            )
    return found


class Stream(enum.Enum):
    """The five streams of every rank."""

    TRANS = 0
    COMP_1 = 1
    COMP_2 = 2
    COMP_3 = 3
    UPDATE = 4


@dataclass(frozen=True, slots=True, eq=False)
class External:
    """Work that somebody else enqueues. Two of them are equal only if they are one object.

    `kind` "callback": `body(rank, stream)` enqueues on a stream and returns nothing.
    `kind` "graph": `body` has a cudaGraph_t, as an int, for each rank; it becomes a child graph.
    What it reads and writes has to be declared like that of any op; `resources` name what it
    touches beside the arena.

    A callback gets the rank's index and the stream, a cudaStream_t as an int, and runs on the
    rank's own thread, so it is called for several ranks at the same time. It is called for each of
    its stages

    - once in the warm-up, before a runtime first captures the program or runs it eagerly. There the
      work really runs. Of what it declares as written, persistent bytes are put back, and before an
      eager run all of it; what it writes elsewhere stays.
    - once in each capture, which records its work; a staged capture records equal stages once.
    - never in a replayed step, and in an eager step each time.

    A Python function becomes work of the stream through `platform.cudart.cudaLaunchHostFunc` with a
    `trlow.binding.cudart.cudaHostFn_t`, which the caller keeps alive; it runs in the warm-up and in
    every step, and must not call CUDA.

    `runtime.arenas[rank].address(name)` is the address of a tensor, region or range. A program is
    often made before its runtime: the callback may close over a variable that is assigned
    afterwards. No callback may end a capture, synchronise (with a stream, an event or the device),
    or allocate or free device memory: what it needs is made before.
    """

    kind: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    body: object
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Accept any iterable of ranges and of names; refuse a body that does not fit the kind."""
        for which, kind in (("reads", Range), ("writes", Range), ("resources", str)):
            given = getattr(self, which)
            object.__setattr__(self, which, _members(f"external: {which}", given, kind))
        if self.kind == "callback":
            fits = callable(self.body)
        elif self.kind == "graph":
            fits = isinstance(self.body, tuple) and all(type(g) is int for g in self.body)
        else:
            raise PlanError(f"external kind {self.kind!r} is unknown; use 'callback' or 'graph'")
        if not fits:
            need = "a function" if self.kind == "callback" else "a tuple of one int for each rank"
            raise PlanError(f"external {self.kind}: body {self.body!r} must be {need}")


@dataclass(frozen=True, repr=False)
class Stage:
    """Ops in order on one stream, then the external work if there is any."""

    name: str
    stream: Stream
    ops: tuple[RangeOp, ...] = ()
    external: External | None = None
    resources: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Accept any iterable of ops and resources. Raises PlanError for wrong types."""
        where = f"stage {self.name!r}"
        if not isinstance(self.stream, Stream):
            raise PlanError(
                f"{where}: stream {short(self.stream)} is no Stream; give one of "
                f"{', '.join(map(str, Stream))}"
            )
        if self.external is not None and not isinstance(self.external, External):
            raise PlanError(
                f"{where}: external {short(self.external)} is no External; give "
                "External(kind, reads, writes, body)"
            )
        object.__setattr__(self, "ops", _members(f"{where}: ops", self.ops, RangeOp))
        names = _members(f"{where}: resources", self.resources, str)
        object.__setattr__(self, "resources", frozenset(names))

    def __repr__(self) -> str:
        reads, writes = (", ".join(map(str, ranges)) for ranges in (self.reads, self.writes))
        tail = f", {sorted(self.all_resources)}" if self.all_resources else ""
        return f"Stage({self.name!r}, {self.stream.name}, reads [{reads}], writes [{writes}]{tail})"

    @cached_property
    def reads(self) -> tuple[Range, ...]:
        """Every range that an op or the external work reads, each once."""
        return self._declared("reads")

    @cached_property
    def writes(self) -> tuple[Range, ...]:
        """Every range that an op or the external work writes, each once."""
        return self._declared("writes")

    @property
    def owners(self) -> tuple[RangeOp | External, ...]:
        """What reads and writes, in order."""
        return self.ops if self.external is None else (*self.ops, self.external)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The actions of all ops in order."""
        return tuple(action for op in self.ops for action in op.actions)

    @cached_property
    def all_resources(self) -> frozenset[str]:
        """Resources given, those of the external work, and "comm:0", "slot:X" as ops use them."""
        found = set(self.resources)
        if self.external is not None:
            found.update(self.external.resources)
        for action in self.actions:
            if isinstance(action, Collective):
                found.add("comm:0")
            elif isinstance(action, FeedCopy):
                found.add(f"slot:{action.slot}")
        return frozenset(found)

    def groups(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions as they are issued: each alone, but neighbouring collectives as one.

        NCCL may run the calls of one group side by side, so a collective that conflicts with one
        in the group opens the next group.
        """
        groups: list[list[Action]] = []
        for action in self.actions:
            if (
                isinstance(action, Collective)
                and groups
                and all(
                    isinstance(one, Collective) and not one.conflicts(action) for one in groups[-1]
                )
            ):
                groups[-1].append(action)
            else:
                groups.append([action])
        return tuple(tuple(group) for group in groups)

    def _declared(self, which: str) -> tuple[Range, ...]:
        return tuple(dict.fromkeys(r for owner in self.owners for r in getattr(owner, which)))


class Edge(NamedTuple):
    """Stage `dst` waits for stage `src`; each is (phase, index in the phase)."""

    src: tuple[int, int]
    dst: tuple[int, int]
    distance: int  # 0: in the same step; 1: dst is in the next step


@dataclass(frozen=True)
class Program:
    """Stages in order, one tuple for each phase. Stages that do nothing are dropped."""

    name: str
    phases: tuple[tuple[Stage, ...], ...]

    def __post_init__(self) -> None:
        """Drop what does nothing.

        Raises PlanError for no phase, a name twice in one, and what is no phase or no stage.
        """
        if not isinstance(self.phases, Iterable):
            raise PlanError(
                f"program {self.name!r}: phases must be a tuple with a tuple of stages for each "
                f"phase, but is {short(self.phases)}; for one phase use Program.single"
            )
        phases = (self._phase(self.name, k, phase) for k, phase in enumerate(self.phases))
        kept = tuple(
            tuple(s for s in phase if s.actions or s.external is not None) for phase in phases
        )
        if not kept:
            raise PlanError(f"program {self.name!r} has no phase; give it at least one")
        for number, phase in enumerate(kept):
            names = [stage.name for stage in phase]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise PlanError(
                    f"program {self.name!r}, phase {number}: two stages are named {twice[0]!r}; "
                    "rename one"
                )
            where = f"program {self.name!r}, phase {number}"
            check_order(where, (each for stage in phase for each in stage.owners))
        object.__setattr__(self, "phases", kept)

    @classmethod
    def single(cls, name: str, stages: Iterable[Stage]) -> Program:
        """Return a program whose steps are all alike."""
        return cls(name, (cls._phase(name, 0, stages),))

    @classmethod
    def alternating(cls, name: str, a: Iterable[Stage], b: Iterable[Stage]) -> Program:
        """Return a program whose even steps run `a` and odd steps run `b`."""
        return cls(name, (cls._phase(name, 0, a), cls._phase(name, 1, b)))

    def hazards(self) -> tuple[Edge, ...]:
        """Return every conflicting pair of two consecutive steps, those of one stream too."""
        return tuple(self._edge(*found) for found in self._order.hazards())

    def edges(self) -> tuple[Edge, ...]:
        """Return the edges between streams that order every hazard and imply none of each other.

        With stream order they order exactly what the hazards order. Raises PlanError if stages two
        or more steps apart conflict and nothing in the steps between carries the order on.
        """
        return self._edges

    def concurrent(self, phase: int, i: int, j: int) -> bool:
        """Tell whether neither of two stages of one step waits, if only through others, for one."""
        low, high = sorted((i, j))
        return low != high and not self._order.reaches(phase, low, high)

    def collectives(self, phase: int) -> tuple[tuple[Collective, ...], ...]:
        """Return the groups of collectives of one step, in the order of issue."""
        groups = (group for stage in self.phases[phase] for group in stage.groups())
        found = (tuple(a for a in group if isinstance(a, Collective)) for group in groups)
        return tuple(group for group in found if group)

    @staticmethod
    def _phase(name: str, number: int, stages: Iterable[Stage]) -> tuple[Stage, ...]:
        return _members(f"program {name!r}, phase {number}", stages, Stage)

    @cached_property
    def _order(self) -> Order:
        return Order(
            [
                [Access(s.stream.value, s.reads, s.writes, s.all_resources) for s in phase]
                for phase in self.phases
            ]
        )

    @cached_property
    def _edges(self) -> tuple[Edge, ...]:
        race = self._order.unordered()
        if race is not None:
            phase, i, j, distance = race
            later = (phase + distance) % len(self.phases)
            first, second = self.phases[phase][i].name, self.phases[later][j].name
            raise PlanError(
                f"program {self.name!r}: {first!r} of phase {phase} and {second!r} of phase "
                f"{later}, {distance} steps later, conflict, and nothing between orders them; give "
                "both, and a stage of a step between, one resource"
            )
        return tuple(self._edge(*found) for found in self._order.edges())

    def _edge(self, phase: int, i: int, j: int, distance: int) -> Edge:
        return Edge((phase, i), ((phase + distance) % len(self.phases), j), distance)
