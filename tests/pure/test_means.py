"""Mean strategies as data: which actions, which reads, and what is refused."""

from __future__ import annotations

import pytest

from trlow.action import Collective, Launch, RangeOp
from trlow.dtype import BF16, F16, F32, I32
from trlow.errors import PlanError
from trlow.plan import Range
from trlow.program import Stage, Stream
from trlow.range_op import MEAN_STRATEGIES, mean_all_reduce


def at(offset, count, dtype=F32):
    return Range(offset, count * dtype.itemsize, dtype, f"r{offset}", f"r{offset}")


A, B, FACTOR = at(0, 8), at(256, 3), at(512, 1)


@pytest.mark.parametrize(
    ("strategy", "op", "reads"),
    [
        ("deferred", "sum", (A, B)),
        ("sum_then_scale", "sum", (A, B, FACTOR)),
        ("avg", "avg", (A, B)),
        ("premulsum", "premulsum", (A, B, FACTOR)),
    ],
)
def test_each_strategy_has_its_collectives_and_declares_what_it_reads(strategy, op, reads):
    made = mean_all_reduce(A, B, factor=FACTOR, strategy=strategy)
    inner = FACTOR if op == "premulsum" else None
    collectives = tuple(Collective("all_reduce", r, op, factor=inner) for r in (A, B))
    kernels = tuple(action for action in made.actions if isinstance(action, Launch))
    assert made.actions == (*collectives, *kernels)
    assert len(kernels) == (2 if strategy == "sum_then_scale" else 0)
    assert (made.reads, made.writes) == (reads, (A, B))


def test_the_articles_strategy_is_the_default_and_all_are_listed():
    default = mean_all_reduce(A, factor=FACTOR)
    assert default == mean_all_reduce(A, factor=FACTOR, strategy="sum_then_scale")
    made = {mean_all_reduce(A, factor=FACTOR, strategy=name) for name in MEAN_STRATEGIES}
    assert len(made) == len(MEAN_STRATEGIES) == 4


@pytest.mark.parametrize("dtype", [F16, BF16, I32])
def test_a_premultiplied_sum_takes_its_factor_in_the_dtype_of_the_range(dtype):
    whole, factor = at(0, 8, dtype), at(512, 1, dtype)
    made = mean_all_reduce(whole, factor=factor, strategy="premulsum")
    assert made.actions == (Collective("all_reduce", whole, "premulsum", factor=factor),)
    with pytest.raises(PlanError, match=f"one {dtype}"):
        mean_all_reduce(whole, factor=FACTOR, strategy="premulsum")


@pytest.mark.parametrize("strategy", ["avg", "deferred"])
def test_a_strategy_without_a_factor_needs_none_and_takes_integers(strategy):
    whole = at(0, 8, I32)
    assert mean_all_reduce(whole, strategy=strategy).reads == (whole,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "average", "factor": FACTOR}, ["'average'", "premulsum"]),
        ({"strategy": "premulsum"}, ["'premulsum'", "factor"]),
        ({}, ["'sum_then_scale'", "factor"]),
        ({"strategy": "premulsum", "factor": at(4, 1)}, ["r0", "r4", "overlap"]),
        ({"strategy": "premulsum", "factor": at(512, 2)}, ["r512", "one float32"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, words):
    with pytest.raises(PlanError) as caught:
        mean_all_reduce(A, **arguments)
    for word in words:
        assert word in str(caught.value)


def test_an_op_cannot_hide_its_factor():
    hidden = Collective("all_reduce", A, "premulsum", factor=FACTOR)
    with pytest.raises(PlanError, match=r"r512.*declares as read"):
        RangeOp("hidden", (A,), (A,), (hidden,))
    with pytest.raises(PlanError, match="needs a factor"):
        Collective("all_reduce", A, "premulsum")
    with pytest.raises(PlanError, match="reads no factor"):
        Collective("all_reduce", A, "sum", factor=FACTOR)


def test_a_factor_that_a_collective_writes_parts_their_groups():
    uses = mean_all_reduce(A, factor=FACTOR, strategy="premulsum")
    writes = mean_all_reduce(FACTOR, strategy="deferred")
    apart = mean_all_reduce(B, factor=FACTOR, strategy="premulsum")
    for ops, sizes in (
        ((uses, apart), [2]),
        ((uses, writes), [1, 1]),
        ((writes, uses), [1, 1]),
        ((uses, uses), [1, 1]),
    ):
        assert [len(group) for group in Stage("S", Stream.UPDATE, ops).groups()] == sizes


@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_empty_ranges_have_no_actions(strategy):
    nothing = at(0, 0)
    assert mean_all_reduce(nothing, factor=FACTOR, strategy=strategy).actions == ()
