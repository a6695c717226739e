"""Actions, and the operation that holds them: the part of a program that is enqueued.

Order is derived from the ranges that an op declares, so an action may touch only what its op
declares; the constructor of RangeOp checks that.
"""

from __future__ import annotations

from dataclasses import dataclass

from trlow.errors import PlanError
from trlow.plan import Range

__all__ = ["Action", "Collective", "FeedCopy", "Launch", "PeerCopy", "RangeOp"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel. A Range argument is the device address of its start, an int a static extent."""

    kernel: str
    args: tuple[Range | int, ...]  # in the order of the kernel's declaration
    work: int  # work items, from which the launch geometry follows

    def __post_init__(self) -> None:
        """Refuse a parameter by value: only extents are ints, and nothing is a float."""
        for arg in self.args:
            if not isinstance(arg, Range) and type(arg) is not int:
                raise PlanError(
                    f"kernel {self.kernel!r}: argument {arg!r} must be a range or an int extent; "
                    "a value that may change is put in the arena and given by its range"
                )


@dataclass(frozen=True, slots=True)
class Collective:
    """One NCCL call over all ranks, in place on one range."""

    kind: str  # "all_reduce" or "broadcast"
    range: Range
    op: str = "sum"  # of an all_reduce: "sum", "avg", "premulsum" and NCCL's others
    root: int = 0  # rank whose bytes a broadcast spreads
    factor: Range | None = None  # of premulsum: one element of the range's dtype, read by address
    joins: bool = False  # a rank comes when all that it has sent by PeerCopy is there

    def __post_init__(self) -> None:
        """Refuse a premulsum without its factor, and a factor that nothing reads."""
        if (self.op == "premulsum") != (self.factor is not None):
            need = "needs a factor" if self.factor is None else "reads no factor"
            raise PlanError(f"{self.kind} of {self.range}: {self.op!r} {need}")

    def conflicts(self, other: Collective) -> bool:
        """Whether one writes a byte that the other touches: then they are not of one group."""
        return any(
            write.overlaps(touched)
            for write, one in ((self.range, other), (other.range, self))
            for touched in (one.range, one.factor)
            if touched is not None
        )


@dataclass(frozen=True, slots=True)
class FeedCopy:
    """Copy a pinned input slot over a range of the arena."""

    slot: str  # "A" or "B"
    range: Range


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """Copy a range over one in the arena of the next rank; the last rank's goes to rank 0.

    With one rank it does nothing.
    """

    range: Range  # there
    source: Range  # here


Action = Launch | Collective | FeedCopy | PeerCopy


@dataclass(frozen=True, slots=True)
class RangeOp:
    """One operation. Raises PlanError if an action touches bytes that are not declared."""

    kind: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        """Check that every range of every action lies in a declared one."""
        for action in self.actions:
            if isinstance(action, Launch):
                touched = [arg for arg in action.args if isinstance(arg, Range)]
                self._check(touched, self.reads + self.writes, "declares")
                continue
            self._check([action.range], self.writes, "declares as written")
            read = action.factor if isinstance(action, Collective) else None
            if isinstance(action, PeerCopy):
                read = action.source
            if read is not None:
                self._check([read], self.reads, "declares as read")

    def _check(self, touched: list[Range], declared: tuple[Range, ...], what: str) -> None:
        for one in touched:
            if one.nbytes and not any(whole.contains(one) for whole in declared):
                raise PlanError(
                    f"op {self.kind!r} touches {one}, which lies in none of the ranges it "
                    f"{what}: {', '.join(map(str, declared)) or 'none'}"
                )
