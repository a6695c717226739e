"""Actions, and the operation that holds them: the part of a program that is enqueued.

Order is derived from the ranges that an op declares, so an action may touch only what its op
declares; the constructor of RangeOp checks that.
"""

from __future__ import annotations

from dataclasses import dataclass

from trlow.errors import PlanError
from trlow.plan import Range

__all__ = ["Action", "Collective", "FeedCopy", "Launch", "RangeOp"]


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
    op: str = "sum"
    root: int = 0  # rank whose bytes a broadcast spreads


@dataclass(frozen=True, slots=True)
class FeedCopy:
    """Copy a pinned input slot over a range of the arena."""

    slot: str  # "A" or "B"
    range: Range


Action = Launch | Collective | FeedCopy


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
                declared = self.reads + self.writes
            else:
                touched, declared = [action.range], self.writes
            for one in touched:
                if one.nbytes and not any(whole.contains(one) for whole in declared):
                    what = "declares" if isinstance(action, Launch) else "declares as written"
                    raise PlanError(
                        f"op {self.kind!r} touches {one}, which lies in none of the ranges it "
                        f"{what}: {', '.join(map(str, declared)) or 'none'}"
                    )
