from __future__ import annotations

import threading

import numpy as np
import pytest

import trlow
from trlow.errors import PlanError, UsageError

pytestmark = pytest.mark.timeout(60)


def test_a_tensor_has_the_same_offset_in_every_arena(runtime, small):
    for name in ("w", "early", "late", "feature"):
        offsets = {arena.address(name) - arena.base for arena in runtime.arenas}
        assert offsets == {small.plan[name].offset}


def test_what_goes_in_comes_out_and_touches_no_neighbour(runtime):
    values = np.arange(24, dtype=np.float32)
    runtime.arenas[1].copy_in("late", values)
    assert (runtime.arenas[1].copy_out("late") == values).all()
    assert (runtime.arenas[1].copy_out("early") == 1).all()
    assert (runtime.arenas[2].copy_out("late") == 20).all()


@pytest.mark.parametrize(
    "array",
    [np.zeros(23, np.float32), np.zeros((24, 1), np.float32), np.zeros(24, np.float64)],
    ids=["short", "other shape", "other type"],
)
def test_an_array_that_does_not_fit_is_refused_with_both_shapes(runtime, array):
    with pytest.raises(UsageError, match="late"):
        runtime.arenas[0].copy_in("late", array)


def test_unknown_names_are_plan_errors(runtime):
    with pytest.raises(PlanError, match="nothing"):
        runtime.arenas[0].copy_out("nothing")


def test_a_view_is_the_memory_itself(runtime):
    view = runtime.arenas[3].view("late")
    view[:] = 7
    assert (runtime.arenas[3].copy_out("late") == 7).all()


def test_pads_and_fresh_memory_are_zero(settings, small):
    with trlow.Runtime(settings, small.plan) as runtime:
        for arena in runtime.arenas:
            everything = arena.copy_out(small.plan.span("W_BUCKET_0", "S_SCALAR_INT"))
            assert not everything.any()


def test_an_arena_larger_than_the_memory_is_refused_before_anything_is_allocated(settings):
    builder = trlow.PlanBuilder(
        trlow.RegionTable("t", (trlow.Region("G", trlow.F32, "gradients"),), ())
    )
    builder.add("G", "g", (1 << 40,))
    plan = builder.build()
    threads = threading.active_count()
    with pytest.raises(PlanError, match=str(plan.arena_nbytes)):
        trlow.Runtime(settings, plan)
    assert threading.active_count() == threads


def test_copies_work_from_a_fresh_thread_and_leave_its_device(runtime):
    seen = []

    def work():
        runtime.arenas[2].copy_in("late", np.full(24, 5, np.float32))
        seen.append(runtime.arenas[2].copy_out("late"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert (seen[0] == 5).all()
