"""What trlow.testing offers: all of it by name, strategies that hold what they promise."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from trlow import (
    testing,
    testing_arithmetic,
    testing_device,
    testing_plan,
    testing_program,
    testing_random,
    testing_replay,
    testing_strategies,
)
from trlow.dtype import F32, U8
from trlow.testing import (
    DEVICE_INVARIANTS,
    INVARIANTS,
    byte_ranges,
    dtypes,
    few_bit_floats,
    frozen_sets,
    plan_ranges,
    plans,
    programs,
    regions,
    tables,
    training_steps,
    variants,
    world_sizes,
)


def test_the_entrance_offers_every_strategy_and_check():
    parts: tuple[ModuleType, ...] = (
        *(testing_plan, testing_program, testing_strategies),
        *(testing_arithmetic, testing_device, testing_replay, testing_random),
    )
    offered = {name for part in parts for name in part.__all__} - {"require"}
    beside = {"INVARIANTS", "DEVICE_INVARIANTS", "MODES", "emulate", "every_op", "initial_bytes"}
    assert set(testing.__all__) == offered | beside
    checks = {name for name in offered if name.startswith("check_")}
    numbered = (*INVARIANTS.values(), *DEVICE_INVARIANTS.values())
    assert {check.__name__ for check in numbered} == checks


def test_every_check_says_its_number():
    for number, check in (*INVARIANTS.items(), *DEVICE_INVARIANTS.items()):
        assert check.__doc__ is not None
        assert check.__doc__.startswith(f"{number}: ")


@given(st.lists(few_bit_floats(), min_size=1, max_size=64), st.randoms())
def test_few_bit_floats_sum_exactly_in_any_order(values, random):
    exact = sum(values)
    shuffled = random.sample(values, len(values))
    total = np.float32(0)
    for value in shuffled:
        total += np.float32(value)
    assert float(total) == exact


@given(world_sizes())
def test_world_sizes_are_powers_of_two(size):
    assert 1 <= size <= 64
    assert size & (size - 1) == 0


def test_other_world_sizes_are_drawn_on_request():
    assert find(world_sizes(any_world_size=True), lambda size: size & (size - 1)) == 3


@given(tables())
def test_drawn_tables_have_each_gradient_region_in_one_bucket(table):
    owned = [
        k
        for spec in table.buckets
        for k in range(table.index(spec.first), table.index(spec.last) + 1)
    ]
    gradients = [k for k, region in enumerate(table) if region.kind == "G"]
    assert sorted(owned) == gradients


@given(regions(), dtypes(), variants())
def test_small_strategies_draw_what_they_say(region, dtype, shapes):
    assert region.name
    assert dtype.itemsize in {1, 2, 4, 8}
    assert all(extent > 0 for shape in shapes.values() for extent in shape)


@given(byte_ranges(64), byte_ranges(64, F32))
def test_byte_ranges_stay_in_their_arena(a, b):
    assert max(a.end, b.end) <= 64
    assert (a.dtype, b.dtype) == (U8, F32)


def drawn(strategy, condition):
    """Find an example, however large: shrinking it would take most of the time."""
    quick = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    return find(strategy, condition, settings=quick)


def test_the_strategies_reach_the_cases_that_matter():
    """Each of these is rare enough that a slip in a strategy could lose it unseen."""
    drawn(plans(), lambda plan: len(plan.buckets()) >= 2)
    drawn(plans(), lambda plan: any(len(plan.shapes[name]) >= 2 for name in plan.shapes))
    drawn(programs(), lambda p: any(e.distance == 0 for e in p.edges()))
    drawn(programs(), lambda p: any(s.external is not None for s in p.phases[0]))
    drawn(byte_ranges(), lambda r: r.nbytes == 0)
    drawn(plans().flatmap(plan_ranges), lambda r: r.first != r.last)

    def overlapping(step):
        names = [stage.name for stage in step[2].phases[0]]
        return {"DEEP_COMM", "FIRST_COMM", "FIRST_BWD"} <= set(names)

    drawn(training_steps(), overlapping)
    drawn(training_steps(), lambda step: step[1] and overlapping(step))


@given(plans().flatmap(lambda plan: st.tuples(st.just(plan), frozen_sets(plan))))
def test_what_is_frozen_is_a_gradient(drawn):
    plan, frozen = drawn
    assert all(plan.table[plan[name].region].kind == "G" for name in frozen)


@pytest.mark.installed
def test_importing_trlow_imports_no_hypothesis():
    code = (
        "import sys, trlow\n"
        "print([m for m in sys.modules if m.partition('.')[0] == 'hypothesis' or 'testing' in m\n"
        "       and m.startswith('trlow')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
