"""Sums by copies: what the ops declare, what they refuse, and the order that a step has to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.dtype import BF16, F16, F32, I32, DType
from trlow.errors import PlanError
from trlow.exchange import add, admit, inboxes_of, receive, send
from trlow.plan import Range
from trlow.program import External, Program, Stage, Stream
from trlow.range_op import Collective, Launch, PeerCopy, RangeOp, clear, copy


def at(block: int, count: int = 8, dtype: DType = F32, name: str = "") -> Range:
    """`count` elements in block `block` of 1024 bytes."""
    label = name or f"r{block}"
    return Range(1024 * block, count * dtype.itemsize, dtype, label, label)


INBOX, MINE, OTHER = at(0, name="inbox"), at(1), at(2)
TOKEN = at(10, 1, name="token")
NOTHING = at(5, 0)
MEETING = Collective("all_reduce", TOKEN, "max")


def program(*ops: RangeOp | External) -> Program:
    streams = list(Stream)
    stages = []
    for k, op in enumerate(ops):
        given = ((), op) if isinstance(op, External) else ((op,), None)
        stages.append(Stage(f"s{k}", streams[k % 5], *given))
    return Program.single("drawn", stages)


def test_a_range_is_sent_by_one_copy_and_its_inbox_is_written():
    op = send(INBOX, MINE)
    assert op.actions == (PeerCopy(INBOX, MINE),)
    assert (op.reads, op.writes) == ((MINE,), (INBOX,))


@pytest.mark.parametrize("make", [admit, receive])
def test_ranks_meet_in_a_collective_that_changes_nothing_and_counts_as_use_of_every_inbox(make):
    op = make(TOKEN, INBOX, OTHER, NOTHING)
    assert op.actions == (replace(MEETING, joins=make is receive),)
    assert op.reads == op.writes == (TOKEN, INBOX, OTHER)


def test_inboxes_are_what_is_admitted_without_the_tokens():
    ops = (admit(TOKEN, INBOX), send(INBOX, MINE), receive(TOKEN, INBOX), admit(TOKEN, OTHER))
    assert inboxes_of((*ops, admit(TOKEN))) == (INBOX, OTHER)


@pytest.mark.parametrize(("dtype", "kernel"), [(F32, "f32"), (F16, "f16"), (BF16, "bf16")])
def test_add(dtype, kernel):
    r, other = at(0, 5, dtype), at(1, 5, dtype)
    op = add(r, other)
    assert op.actions == (Launch(f"add_{kernel}", (r, other, 5), 5),)
    assert (op.reads, op.writes) == ((r, other), (r,))


@pytest.mark.parametrize(
    "op", [send(NOTHING, at(6, 0)), add(NOTHING, at(6, 0)), admit(TOKEN), receive(TOKEN, NOTHING)]
)
def test_nothing_has_no_actions(op):
    assert (op.reads, op.writes, op.actions) == ((), (), ())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: send(INBOX, at(1, 7)), ["inbox", "r1", "counts"]),
        (lambda: send(INBOX, at(1, 8, I32)), ["inbox", "r1", "dtypes"]),
        (lambda: send(INBOX, INBOX), ["inbox", "overlap"]),
        (lambda: add(MINE, at(2, 7)), ["r1", "r2", "counts"]),
        (lambda: add(MINE, at(2, 8, F16)), ["r1", "r2", "dtypes"]),
        (lambda: add(at(1, 8, I32), at(2, 8, I32)), ["r1", "float32"]),
        (lambda: add(MINE, MINE), ["r1", "overlap"]),
        (lambda: admit(at(10, 2, name="pair"), INBOX), ["pair", "one element"]),
        (lambda: receive(at(0, 1, name="first"), INBOX), ["first", "inbox", "overlap"]),
        (lambda: admit(TOKEN, INBOX, INBOX), ["inbox", "overlap"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, says):
    with pytest.raises(PlanError) as caught:
        make()
    for word in says:
        assert word in str(caught.value)


def reading(*ranges: Range) -> External:
    return External("callback", ranges, (), lambda _rank, _stream: None)


HALF, REST = Range(0, 16, F32, "half", "half"), Range(16, 16, F32, "rest", "rest")
BOTH = admit(TOKEN, INBOX, OTHER)
TWICE = (PeerCopy(INBOX, MINE), PeerCopy(OTHER, INBOX))  # the second reads what the first writes
ADMIT, SEND, RECEIVE = admit(TOKEN, INBOX), send(INBOX, MINE), receive(TOKEN, INBOX)


@pytest.mark.parametrize(
    "ops",
    [
        (ADMIT, SEND, RECEIVE),
        (ADMIT, clear(OTHER), SEND, copy(MINE, OTHER), RECEIVE, add(MINE, INBOX)),
        (copy(INBOX, OTHER), ADMIT, SEND, RECEIVE, ADMIT, SEND, RECEIVE, reading(INBOX)),
        (admit(TOKEN, INBOX, OTHER), SEND, send(OTHER, at(3)), receive(TOKEN, OTHER, INBOX)),
        (ADMIT, send(HALF, at(1, 4)), RECEIVE),
        (send(NOTHING, at(6, 0)), clear(OTHER)),
    ],
)
def test_an_admitted_inbox_that_is_received_is_taken(ops):
    program(*ops).edges()


@pytest.mark.parametrize(
    "ops",
    [
        (SEND, RECEIVE),
        (SEND, ADMIT, RECEIVE),
        (RangeOp("shift", (MINE,), (INBOX,), (PeerCopy(INBOX, MINE),)), RECEIVE),
        (RangeOp("admit", (), (INBOX,), ()), clear(OTHER), SEND, RECEIVE),
        (RangeOp("admit", (), (INBOX,), (Launch("clear", (INBOX, 32), 2),)), SEND, RECEIVE),
        (ADMIT, copy(at(2, 4), HALF), SEND, RECEIVE),
        (ADMIT, send(TOKEN, at(1, 1)), RECEIVE),
        (BOTH, RangeOp("shift", (MINE, INBOX), (INBOX, OTHER), TWICE), RECEIVE),
        (admit(TOKEN, HALF, REST), SEND, RECEIVE),
        (ADMIT, copy(OTHER, INBOX), SEND, RECEIVE),
        (ADMIT, reading(INBOX), SEND, RECEIVE),
        (ADMIT, SEND, RECEIVE, SEND, RECEIVE),
        (ADMIT, SEND, send(INBOX, OTHER), RECEIVE),
        (admit(TOKEN, OTHER), SEND, RECEIVE),
        (admit(TOKEN, HALF), SEND, RECEIVE),
    ],
)
def test_an_inbox_that_is_not_admitted_is_refused(ops):
    with pytest.raises(PlanError, match=r"(inbox|token) .*is sent to another rank.*admit it first"):
        program(*ops)


@pytest.mark.parametrize(
    "ops",
    [
        (ADMIT, SEND),
        (ADMIT, SEND, add(MINE, INBOX), RECEIVE),
        (ADMIT, SEND, reading(HALF), RECEIVE),
        (ADMIT, SEND, receive(TOKEN, HALF)),
        (ADMIT, SEND, ADMIT, RECEIVE),
        (ADMIT, SEND, receive(TOKEN, HALF, REST)),
        (ADMIT, SEND, RangeOp("receive", (), (INBOX,), ())),
        (ADMIT, RangeOp("shift", (MINE,), (INBOX,), (PeerCopy(INBOX, MINE),)), copy(MINE, INBOX)),
    ],
)
def test_an_inbox_that_is_not_received_is_refused(ops):
    with pytest.raises(PlanError, match=r"inbox .*is sent to, and used or left.*receive it"):
        program(*ops)


def test_an_action_may_touch_only_what_its_op_declares():
    with pytest.raises(PlanError, match="declares as read"):
        RangeOp("send", (), (INBOX,), (PeerCopy(INBOX, MINE),))
    with pytest.raises(PlanError, match="declares as written"):
        RangeOp("send", (MINE,), (), (PeerCopy(INBOX, MINE),))


OPS = (
    *(ADMIT, admit(TOKEN, HALF), admit(TOKEN, REST), admit(TOKEN, HALF, OTHER)),
    *(SEND, send(HALF, at(1, 4)), send(REST, at(1, 4)), send(OTHER, MINE), send(TOKEN, at(1, 1))),
    *(RECEIVE, receive(TOKEN, HALF), receive(TOKEN, REST), receive(TOKEN, OTHER, INBOX)),
    *(clear(MINE), clear(HALF), copy(MINE, INBOX), copy(OTHER, MINE), reading(REST, OTHER)),
)


def touched_bytes(*ranges: Range) -> set[int]:
    return {byte for r in ranges for byte in range(r.offset, r.end)}


def is_safe(ops: Sequence[RangeOp | External]) -> bool:
    """Byte by byte: one that is sent to was admitted and not used since, and is received next."""
    admitted, sent = set(), set()
    for op in ops:
        mine = touched_bytes(*op.reads, *op.writes)
        if op.kind in {"admit", "receive"}:
            token, met = touched_bytes(TOKEN), mine - touched_bytes(TOKEN)
            if sent & (mine if op.kind == "admit" else token):
                return False
            sent -= met
            admitted = (admitted - mine) | (met if op.kind == "admit" else set())
        elif op.kind == "send":
            into = touched_bytes(*op.writes)
            if not into <= admitted or sent & mine:
                return False
            sent |= into
            admitted -= mine
        else:
            if sent & mine:
                return False
            admitted -= mine
    return not sent


@given(st.lists(st.sampled_from(OPS), max_size=7))
def test_what_is_accepted_is_safe_byte_by_byte(ops):
    try:
        program(*ops)
    except PlanError:
        return
    assert is_safe(ops)


@pytest.mark.parametrize("ops", list(permutations((ADMIT, SEND, RECEIVE, copy(MINE, INBOX)))))
def test_of_all_orders_the_safe_ones_are_accepted(ops):
    accepted = True
    try:
        program(*ops)
    except PlanError:
        accepted = False
    assert accepted is is_safe(ops)


def test_thousands_of_inboxes_are_checked_in_passing():
    boxes = [at(100 + k, name=f"inbox{k}") for k in range(3000)]
    sends = [send(box, MINE) for box in boxes]
    ops = (admit(TOKEN, *boxes), *sends, receive(TOKEN, *boxes))
    Program.single("many", [Stage("one", Stream.UPDATE, ops)])
    with pytest.raises(PlanError, match=r"inbox1500 .*is sent to, and used"):
        used = (*ops[:1600], copy(OTHER, boxes[1500]), *ops[1600:])
        Program.single("many", [Stage("one", Stream.UPDATE, used)])
