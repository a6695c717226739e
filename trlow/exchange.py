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

from collections.abc import Iterable, Sequence
from typing import Protocol

from trlow.action import Collective, Launch, PeerCopy, RangeOp
from trlow.errors import PlanError
from trlow.plan import Range
from trlow.range_check import check_apart, check_copy, check_counts, filled_of, float_name

__all__ = ["Touch", "add", "admit", "check_order", "receive", "send"]


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

    Raises PlanError naming the inbox.
    """
    order = list(step)
    for index, sent in enumerate(order):
        if sent.kind != "send" or not sent.writes:
            continue
        (inbox,) = sent.writes
        if not _is_next("admit", inbox, order[:index][::-1]):
            raise PlanError(
                f"{where}: {inbox} is sent to another rank, which may still use it; admit it "
                "first, behind everything that uses it in this step"
            )
        if not _is_next("receive", inbox, order[index + 1 :]):
            raise PlanError(
                f"{where}: {inbox} is sent to, and used or left before it has arrived; receive it"
            )


def _is_next(kind: str, inbox: Range, others: Iterable[Touch]) -> bool:
    """Whether the first of `others` that touches the inbox is of this kind, and covers it."""
    for other in others:
        if any(inbox.overlaps(touched) for touched in (*other.reads, *other.writes)):
            return other.kind == kind and any(whole.contains(inbox) for whole in other.writes)
    return False


def _meeting(kind: str, token: Range, inboxes: Sequence[Range]) -> RangeOp:
    """A collective that changes nothing, and that no rank leaves before all have come."""
    filled = filled_of(kind, tuple(inboxes))
    if not filled:
        return RangeOp(kind, (), (), ())
    if token.count != 1:
        raise PlanError(f"{kind}: token {token} must be one element")
    for inbox in filled:
        check_apart(kind, inbox, token)
    meeting = Collective("all_reduce", token, "max")
    return RangeOp(kind, (token, *filled), (token, *filled), (meeting,))
