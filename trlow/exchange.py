"""A sum over two ranks by copy engines: each sends its own to the next rank, and adds.

NCCL's kernels hold multiprocessors for as long as an all-reduce lasts; a copy engine holds none and
is the faster of the two. Ranks wait for each other in collectives of one element, which can be
aborted like any other; a copy itself never waits, so nothing new can hang.

A copy writes to the memory of another rank, whose own order knows nothing of it. Therefore

    admit      no rank uses what an earlier step has left in its inboxes: the rank before may write
    send       a range to the inbox of the next rank
    receive    all that was sent has arrived: an inbox may be read

in this order, each as often as one likes. `check_order` refuses a program that does otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from trlow.action import Action, Collective, Launch, PeerCopy, RangeOp
from trlow.errors import PlanError
from trlow.plan import Range
from trlow.range_check import check_apart, check_copy, check_counts, filled_of, float_name

__all__ = ["Touch", "add", "admit", "check_order", "inboxes_of", "receive", "send"]


def admit(token: Range, *inboxes: Range) -> RangeOp:
    """Wait until no rank uses its `inboxes` any more: from here on the rank before may write there.

    `token` is one element, equal on all ranks, and stays what it is.
    """
    return _meeting("admit", token, inboxes)


def send(inbox: Range, r: Range) -> RangeOp:
    """Set `inbox` of the next rank to `r`; the last rank's goes to rank 0.

    With one rank nothing is sent. Raises PlanError where dtypes or sizes differ or ranges overlap.
    """
    check_copy("send", inbox, r)
    if not r.nbytes:
        return RangeOp("send", (), (), ())
    return RangeOp("send", (r,), (inbox,), (PeerCopy(inbox, r),))


def receive(token: Range, *inboxes: Range) -> RangeOp:
    """Wait until what ranks have sent to `inboxes` is there; for `token` see `admit`."""
    return _meeting("receive", token, inboxes)


def add(r: Range, other: Range) -> RangeOp:
    """Set r += other: float32, or float16 or bfloat16 that add in float32 and round once.

    As addition commutes, two ranks that add each other's have the same bytes.
    """
    kind = "add"
    if r.dtype != other.dtype:
        raise PlanError(f"{kind} of {r} and {other}: the dtypes differ")
    check_counts(kind, r, other)
    check_apart(kind, r, other)
    if not r.nbytes:
        return RangeOp(kind, (), (), ())
    launch = Launch(f"add_{float_name(kind, r)}", (r, other, r.count), r.count)
    return RangeOp(kind, (r, other), (r,), (launch,))


def inboxes_of(ops: Iterable[RangeOp]) -> tuple[Range, ...]:
    """Every inbox that is admitted; the token comes first in what such an op declares."""
    return tuple(inbox for op in ops if op.kind == "admit" for inbox in op.writes[1:])


class Touch(Protocol):
    """Whatever reads and writes in a step: an op, or external work."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def reads(self) -> tuple[Range, ...]: ...  # noqa: D102
    @property
    def writes(self) -> tuple[Range, ...]: ...  # noqa: D102


def check_order(where: str, step: Iterable[Touch]) -> None:
    """Refuse a step that sends to what is not admitted, or uses it before it is received.

    What is sent has to lie in one range that was admitted, and in one that is received; what is
    used in part is admitted no more. Raises PlanError naming the inbox.
    """
    admitted, sent = _Spans(), _Spans()
    for each in step:
        actions: tuple[Action, ...] = getattr(each, "actions", ())
        inboxes = [a.range for a in actions if isinstance(a, PeerCopy) and a.range.nbytes]
        tokens = [a.range for a in actions if isinstance(a, Collective)]
        meets = each.kind if tokens and each.kind in {"admit", "receive"} else ""
        # A meeting declares that it reads what it only lets others use.
        reads = () if meets else each.reads
        for touched in (*reads, *(r for r in each.writes if r not in inboxes)):
            named = bool(meets) and touched not in tokens
            for early in sent.take(touched):
                if not (named and meets == "receive" and touched.contains(early)):
                    raise _used_early(where, early)
            admitted.take(touched)
            if named and meets == "admit":
                admitted.add(touched)
        for inbox in inboxes:
            if not admitted.covers(inbox) or sent.take(inbox):
                raise PlanError(
                    f"{where}: {inbox} is sent to another rank, which may still use it; admit it "
                    "first, in one range and behind everything that uses it in this step"
                )
            sent.add(inbox)
    for left in sent:
        raise _used_early(where, left)


def _used_early(where: str, inbox: Range) -> PlanError:
    return PlanError(
        f"{where}: {inbox} is sent to, and used or left before it has arrived; receive it, in one "
        "range"
    )


class _Spans:
    """Ranges that do not overlap, by where they begin."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[Range] = []

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def _around(self, r: Range) -> slice:
        """Where those stand that overlap `r`."""
        first = bisect_right(self._starts, r.offset)
        if first and self._ranges[first - 1].end > r.offset:
            first -= 1
        return slice(first, max(first, bisect_left(self._starts, r.end)))

    def take(self, r: Range) -> list[Range]:
        """Remove those that overlap `r`."""
        if not r.nbytes:
            return []
        where = self._around(r)
        found = self._ranges[where]
        del self._ranges[where], self._starts[where]
        return found

    def add(self, r: Range) -> None:
        """Add one that overlaps none."""
        if r.nbytes:
            place = bisect_left(self._starts, r.offset)
            self._starts.insert(place, r.offset)
            self._ranges.insert(place, r)

    def covers(self, r: Range) -> bool:
        """Whether one of them contains `r`."""
        return any(each.contains(r) for each in self._ranges[self._around(r)])


def _meeting(kind: str, token: Range, inboxes: Sequence[Range]) -> RangeOp:
    """A collective that changes nothing, and that no rank leaves before all have come."""
    filled = filled_of(kind, tuple(inboxes))
    if not filled:
        return RangeOp(kind, (), (), ())
    if token.count != 1:
        raise PlanError(f"{kind}: token {token} must be one element")
    for inbox in filled:
        check_apart(kind, inbox, token)
    meeting = Collective("all_reduce", token, "max", joins=kind == "receive")
    return RangeOp(kind, (token, *filled), (token, *filled), (meeting,))
