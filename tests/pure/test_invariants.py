"""Invariants 1 to 16 hold for whatever is drawn, and each check fails for what breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trlow import layout
from trlow.dtype import F16, F32
from trlow.plan import Bucket, MemoryPlan, PlanBuilder, Range
from trlow.program import Edge, Program, Stage, Stream
from trlow.range_op import Launch, RangeOp, clear
from trlow.region import CNN_TABLE, READINESS_TABLE, BucketSpec, Region, RegionTable, bucket_table
from trlow.testing import INVARIANTS, frozen_sets, plans, programs, training_steps

few = settings(max_examples=40)  # each check draws its own: 600 plans in all
PLAN = range(1, 13)
PROGRAM = (13, 14, 15)


@pytest.mark.parametrize("number", PLAN)
@few
@given(plan=plans())
def test_plans_of_any_table(number, plan):
    INVARIANTS[number](plan)


@pytest.mark.parametrize("number", [7, 10, 16])
@few
@given(data=st.data())
def test_plans_with_anything_frozen(number, data):
    plan = data.draw(plans())
    INVARIANTS[number](plan, data.draw(frozen_sets(plan)))


@pytest.mark.parametrize("phases", [1, 2, 3])
@given(data=st.data())
def test_programs_of_any_stages(phases, data):
    program = data.draw(programs(phases=phases))
    for number in PROGRAM:
        INVARIANTS[number](program)


@given(training_steps())
def test_training_steps(step):
    plan, frozen, program = step
    for number in PROGRAM:
        INVARIANTS[number](program)
    for number in (7, 10, 16):
        INVARIANTS[number](plan, frozen)


def model_plan(table: RegionTable) -> MemoryPlan:
    """A tensor or two in every other region."""
    builder = PlanBuilder(table)
    for k, region in enumerate(table):
        if k % 2 == 0 or region.kind == "G":
            builder.add(region.name, f"{region.name}.0", (k + 1, 3), variants={"short": (k + 5,)})
        if k % 5 == 0:
            builder.add(region.name, f"{region.name}.1", (70,))
    return builder.build()


@pytest.mark.parametrize("number", [*PLAN, 16])
@pytest.mark.parametrize(
    "table", [CNN_TABLE, READINESS_TABLE, bucket_table("mine", 8)], ids=lambda table: table.name
)
def test_the_tables_that_come_with_trlow(number, table):
    INVARIANTS[number](model_plan(table))


def test_with_a_frozen_first_layer_its_stage_still_carries_the_rest():
    plan = model_plan(CNN_TABLE)
    frozen = {"G_FIRST_CONV.0"}
    INVARIANTS[16](plan, frozen)
    _, first = plan.buckets(frozen)
    assert (first.stage, first.first, first.last) == ("FIRST_COMM", "G_BN_BIAS", "G_FC_WEIGHT")
    for kept in ("G_BN_BIAS.0", "G_BN_WEIGHT.0", "G_FC_BIAS.0", "G_FC_WEIGHT.0"):
        assert first.range.contains(plan.range(kept))
    assert not first.range.overlaps(plan.range("G_FIRST_CONV.0"))


# What breaks each invariant, so that the check is seen to fail.

TABLE = RegionTable(
    "t",
    (Region("W_A", F32, ""), Region("H", F16, ""), Region("G_A", F32, ""), Region("G_B", F32, "")),
    (BucketSpec("COMM_A", "G_A", "G_A"), BucketSpec("COMM_B", "G_B", "G_B")),
)


def build(table: RegionTable = TABLE, plan_type: type[MemoryPlan] = MemoryPlan) -> MemoryPlan:
    builder = PlanBuilder(table)
    builder.add("W_A", "w", (3,), variants={"large": (100,)})
    builder.add("H", "h", (5,))
    builder.add("G_A", "g", (70,))
    builder.add("G_A", "g.2", (2,))
    builder.add("G_B", "g.3", (2,))
    plan = builder.build()
    return plan_type(plan.table, plan.alignment, plan.arena_alignment, plan.tensors, plan.shapes)


def changed(name: str, **fields) -> MemoryPlan:
    plan = build()
    return replace(
        plan, tensors=tuple(replace(t, **fields) if t.name == name else t for t in plan.tensors)
    )


class Unrounded(MemoryPlan):
    arena_nbytes = 1544


class OneByteLong(MemoryPlan):
    def span(self, first, last=None):
        span = super().span(first, last)
        return replace(span, nbytes=span.nbytes + 1)


class Swapping(MemoryPlan):
    def range(self, first, last=None):
        low, high = sorted((first, last or first), key=lambda name: self._position(name)[0])
        return super().range(low, high)


class Mixing(MemoryPlan):
    def range(self, first, last=None):
        span = self.span(first, last)
        return Range(span.offset, span.nbytes // 4 * 4, F32, span.first, span.last)


class KeepingFrozen(MemoryPlan):
    def buckets(self, frozen=()):
        return super().buckets()


class MovedByFreezing(MemoryPlan):
    def buckets(self, frozen=()):
        shift = 4 * len(frozen)
        return tuple(
            replace(b, range=replace(b.range, offset=b.range.offset + shift))
            for b in super().buckets(frozen)
        )


class Overlapping(MemoryPlan):
    def buckets(self, frozen=()):
        both = self.range("G_A", "G_B")
        return tuple(Bucket(b.stage, b.first, b.last, both) for b in super().buckets(frozen))


class Forgetting(MemoryPlan):
    def buckets(self, frozen=()):
        return super().buckets(frozen)[:1]


class Blind(MemoryPlan):
    """Its fingerprint sees no alignment, and it reads itself back whatever is written."""

    def fingerprint(self):
        return replace(build(), tensors=self.tensors, table=self.table).fingerprint()


class ForgettingVariants(MemoryPlan):
    def to_json(self):
        return replace(build(), shapes={}).to_json()


UNCOVERED = replace(TABLE, buckets=TABLE.buckets[:1])
BROKEN_PLANS = [
    (1, changed("g", offset=1024)),
    (1, changed("w", slot_nbytes=12)),
    (2, changed("g", offset=1028)),
    (2, build(plan_type=Unrounded)),
    (3, changed("g.2", offset=changed("g").tensors[2].offset)),
    (3, changed("g", id=7)),
    (3, replace(build(), tensors=build().tensors[::-1])),
    (4, build(plan_type=OneByteLong)),
    (4, changed("h", slot_nbytes=4096)),
    (5, changed("g.3", offset=8192)),
    (6, changed("w", slot_nbytes=12)),
    (6, changed("w", slot_nbytes=4096)),
    (7, build(plan_type=KeepingFrozen)),
    (7, build(plan_type=MovedByFreezing)),
    (8, changed("h", offset=0)),
    (8, changed("g.3", offset=2**20)),
    (9, changed("g", offset=1024)),
    (9, build(plan_type=Blind)),
    (9, build(plan_type=ForgettingVariants)),
    (10, build(UNCOVERED)),
    (10, build(plan_type=Overlapping)),
    (10, build(plan_type=Forgetting)),
    (11, build(plan_type=Swapping)),
    (11, build(plan_type=Mixing)),
    (12, changed("g", offset=1024)),
    (16, build(plan_type=Forgetting)),
]


@pytest.mark.parametrize(("number", "plan"), BROKEN_PLANS)
def test_a_broken_plan_fails(number, plan):
    """Errors of the plan itself count too: a plan that contradicts itself may not even be read."""
    INVARIANTS[number](build())
    with pytest.raises((AssertionError, ValueError)):
        INVARIANTS[number](plan)


def test_arithmetic_in_32_bits_or_in_floats_fails_12(monkeypatch):
    exact = layout._round_up
    INVARIANTS[12](build())
    monkeypatch.setattr(layout, "_round_up", lambda v, m: exact(v, m) & 0xFFFFFFFF)
    with pytest.raises(AssertionError):
        INVARIANTS[12](build())


def at(start: int, end: int) -> Range:
    return Range(4 * start, 4 * (end - start), F32, f"f{start}", f"f{end}")


def stage(name: str, stream: Stream, reads=(), writes=()) -> Stage:
    op = RangeOp("test", tuple(reads), tuple(writes), (Launch("test", (), 1),))
    return Stage(name, stream, (op,))


def chain(program_type: type[Program] = Program) -> Program:
    """A writes, B reads that and writes, C reads both; D has nothing to do with them."""
    return program_type.single(
        "chain",
        (
            stage("DEEP_COMM", Stream.COMP_1, (), [at(0, 1)]),
            stage("FIRST_BWD", Stream.UPDATE, [at(0, 1)], [at(1, 2)]),
            stage("C", Stream.COMP_2, [at(0, 2)]),
            Stage("D", Stream.TRANS, (clear(at(8, 9)),)),
        ),
    )


class MissingEdge(Program):
    def edges(self):
        return super().edges()[1:]


class ImpliedEdge(Program):
    def edges(self):
        return (*super().edges(), Edge((0, 0), (0, 2), 0))


class InventedEdge(Program):
    def edges(self):
        return (*super().edges(), Edge((0, 0), (0, 3), 0))


class MissingHazard(Program):
    def hazards(self):
        return super().hazards()[1:]


class RepeatedHazard(Program):
    def hazards(self):
        return super().hazards() * 2


class AllConcurrent(Program):
    def concurrent(self, phase, i, j):
        return True


class OneWayConcurrent(Program):
    def concurrent(self, phase, i, j):
        return i < j and super().concurrent(phase, i, j)


BROKEN_PROGRAMS = [
    (13, MissingEdge),
    (13, ImpliedEdge),
    (13, InventedEdge),
    (13, MissingHazard),
    (13, RepeatedHazard),
    (14, AllConcurrent),
    (14, OneWayConcurrent),
    (15, Program),  # FIRST_BWD reads what DEEP_COMM writes here
]


@pytest.mark.parametrize(("number", "program_type"), BROKEN_PROGRAMS)
def test_a_broken_program_fails(number, program_type):
    for sound in (13, 14):
        INVARIANTS[sound](chain())
    with pytest.raises(AssertionError):
        INVARIANTS[number](chain(program_type))


def test_a_race_that_is_not_refused_fails_13():
    class Silent(Program):
        def edges(self):
            return tuple(Edge((p, i), ((p + d) % 2, j), d) for p, i, j, d in self._order.edges())

    a = (stage("READ", Stream.UPDATE, [at(0, 1)]), stage("WRITE", Stream.COMP_1, (), [at(0, 1)]))
    b = (stage("OTHER", Stream.TRANS),)
    INVARIANTS[13](Program.alternating("race", a, b))
    with pytest.raises(AssertionError, match="race, and it was not refused"):
        INVARIANTS[13](Silent.alternating("race", a, b))


def test_every_check_is_seen_to_fail():
    seen = {number for number, _ in (*BROKEN_PLANS, *BROKEN_PROGRAMS)}
    assert seen == set(INVARIANTS) == set(range(1, 17))
