"""What has to wait for what, from the bytes and resources that each of a sequence touches.

Sets of nodes are Python ints with one bit for each node. Conflicts are found by one sweep over the
sorted ends of all byte ranges; a reachability set is a few ORs per kept edge. So a program of
thousands of stages is ordered in seconds without a quadratic loop in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from trlow.plan import Range

__all__ = ["Access", "Order"]


class Access(NamedTuple):
    """What one stage touches, and the lane (stream) on which it runs in order with others."""

    lane: int
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    resources: frozenset[str]


class Order:
    """The order that conflicts imply over consecutive steps; step k runs phase k mod P."""

    def __init__(self, phases: Sequence[Sequence[Access]]) -> None:
        self._phases = [tuple(phase) for phase in phases]

    def hazards(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (phase, i, j, distance) for every conflicting pair, i of the earlier step."""
        for phase, following in self._windows():
            for i in range(len(self._phases[phase])):
                for j in members(self._conflicts_within(phase, phase, i) & _above(i)):
                    yield phase, i, j, 0
                for j in members(self._conflicts_within(phase, following, i)):
                    yield phase, i, j, 1

    def edges(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield, as `hazards`, the pairs between lanes that nothing else implies."""
        for phase, following in self._windows():
            mine, theirs = self._phases[phase], self._phases[following]
            kept, _ = self._reduced[phase]
            for i, access in enumerate(mine):
                for node in members(kept[i]):
                    distance = int(node >= len(mine))
                    j = node - distance * len(mine)
                    if (theirs if distance else mine)[j].lane != access.lane:
                        yield phase, i, j, distance

    def reaches(self, phase: int, i: int, j: int) -> bool:
        """Tell whether stage j of a phase waits, if only through others, for stage i."""
        return bool(self._reduced[phase][1][i] >> j & 1)

    def unordered(self) -> tuple[int, int, int, int] | None:
        """Return (phase, i, j, distance) of a conflict two or more steps apart that may race.

        Edges join neighbouring steps only. With one phase that is enough: what conflicts with
        stage j conflicts with it in the next step already. With P phases the steps between may
        hold nothing that carries the order on. Beyond P steps stage j's lane carries it.
        """
        count = len(self._phases)
        for phase in range(count if count > 1 else 0):
            chain = [(phase + step) % count for step in range(count + 1)]
            sizes = [len(self._phases[p]) for p in chain]
            starts = [sum(sizes[:step]) for step in range(len(chain))]
            reach = self._chain_reach(chain, starts)
            for i in range(sizes[0]):
                for step in range(2, len(chain)):
                    seen = reach[i] >> starts[step] & _below(sizes[step])
                    missing = self._conflicts_within(phase, chain[step], i) & ~seen
                    if missing:
                        return phase, i, next(members(missing)), step
        return None

    @cached_property
    def _bases(self) -> list[int]:
        sizes = [len(phase) for phase in self._phases]
        return [sum(sizes[:phase]) for phase in range(len(sizes))]

    @cached_property
    def _conflicts(self) -> list[int]:
        return conflicts([access for phase in self._phases for access in phase])

    @cached_property
    def _reduced(self) -> list[tuple[list[int], list[int]]]:
        """Kept edges and reachability of each phase's window: its stages, then the next step's."""
        found = []
        for phase, following in self._windows():
            here, after = len(self._phases[phase]), len(self._phases[following])
            lanes = [a.lane for p in (phase, following) for a in self._phases[p]]
            successors = [
                self._conflicts_within(phase, phase, i) & _above(i)
                | self._conflicts_within(phase, following, i) << here
                for i in range(here)
            ] + [
                (self._conflicts_within(following, following, j) & _above(j)) << here
                for j in range(after)
            ]
            found.append(reduce(successors, lanes))
        return found

    def _windows(self) -> Iterator[tuple[int, int]]:
        for phase in range(len(self._phases)):
            yield phase, (phase + 1) % len(self._phases)

    def _conflicts_within(self, phase: int, other: int, i: int) -> int:
        """Return the stages of phase `other` that conflict with stage i of `phase`."""
        mask = self._conflicts[self._bases[phase] + i]
        return mask >> self._bases[other] & _below(len(self._phases[other]))

    def _chain_reach(self, chain: list[int], starts: list[int]) -> list[int]:
        lanes: list[int] = []
        successors: list[int] = []
        for step, phase in enumerate(chain):
            kept, size = self._reduced[phase][0], len(self._phases[phase])
            lanes += [access.lane for access in self._phases[phase]]
            last = step == len(chain) - 1
            mask = _below(size) if last else -1
            successors += [(kept[i] & mask) << starts[step] for i in range(size)]
        return reduce(successors, lanes)[1]


def conflicts(accesses: Sequence[Access]) -> list[int]:
    """Return, for each access, the set of those it conflicts with; itself if it writes.

    Two conflict if a half-open range that one writes overlaps one that the other touches, or if
    they share a resource. Empty ranges conflict with nothing.
    """
    found = [0] * len(accesses)
    ends: list[tuple[int, int, int, int]] = []  # offset, 0 closes or 1 opens, node, 1 if written
    users: dict[str, int] = {}
    for node, access in enumerate(accesses):
        for written, ranges in enumerate((access.reads, access.writes)):
            for r in ranges:
                if r.nbytes:
                    ends += ((r.offset, 1, node, written), (r.end, 0, node, written))
        for resource in access.resources:
            users[resource] = users.get(resource, 0) | 1 << node
    ends.sort()
    depth = [[0] * len(accesses), [0] * len(accesses)]  # open ranges of each node: read, written
    is_open = [0, 0]  # the nodes that have any
    for _, opens, node, written in ends:
        count = depth[written]
        if opens:
            found[node] |= is_open[1] | (is_open[0] | 1 << node if written else 0)
            count[node] += 1
            is_open[written] |= 1 << node
        else:
            count[node] -= 1
            if not count[node]:
                is_open[written] ^= 1 << node
    for node, mask in enumerate(found):  # what opened earlier has not seen what opened later
        for other in members(mask):
            found[other] |= 1 << node
    for mask in users.values():
        for node in members(mask):
            found[node] |= mask
    return found


def reduce(successors: Sequence[int], lanes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the edges that no path of others implies, and what each node reaches.

    `successors` has only later nodes for each node; the next node of the same lane is added.
    """
    kept, reach = [0] * len(successors), [0] * len(successors)
    following: dict[int, int] = {}  # lane -> its next node
    for node in range(len(successors) - 1, -1, -1):
        left = successors[node]
        if lanes[node] in following:
            left |= 1 << following[lanes[node]]
        following[lanes[node]] = node
        seen = 0
        while left:  # nearest first: whatever leads to a node lies before it
            nearest = left & -left
            kept[node] |= nearest
            seen |= nearest | reach[nearest.bit_length() - 1]
            left &= ~seen
        reach[node] = seen
    return kept, reach


def members(mask: int) -> Iterator[int]:
    """Yield the nodes of a set in order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _above(node: int) -> int:
    """All nodes behind one; an endless set, to be cut by another."""
    return -1 << (node + 1)


def _below(count: int) -> int:
    return (1 << count) - 1
