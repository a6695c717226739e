from __future__ import annotations

import threading
from ctypes import byref, c_void_p

import numpy as np
import pytest

import trlow
from trlow.communicator import Communicators
from trlow.device import Platform
from trlow.errors import CudaError, PlanError, UsageError

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


@pytest.fixture
def small_platform(settings):
    """Four devices of 1 MiB each."""
    platform = Platform.open(settings)
    platform.host.trlowHostConfigure(4, 0, 0, 1 << 20)
    yield platform
    platform.host.trlowHostConfigure(4, 0, 0, 0)


def test_a_shortage_behind_the_communicators_names_rank_wanted_and_free(
    settings, small, small_platform, monkeypatch
):
    taken = []

    class Greedy(Communicators):
        """Takes memory of rank 2, as real communicators do of every rank."""

        def __init__(self, platform, devices):
            super().__init__(platform, devices)
            pointer = c_void_p()
            with platform.on(devices[2]):
                platform.cudart.cudaMalloc(byref(pointer), (1 << 20) - 4096)
            taken.append(pointer)

    monkeypatch.setattr("trlow.connection.Communicators", Greedy)
    with pytest.raises(PlanError) as caught:
        trlow.Runtime(settings, small.plan, platform=small_platform)
    assert (
        f"needs {small.plan.arena_nbytes} bytes, rank 2 (device 2) has 4096 free now that"
        in str(caught.value)
    )
    for pointer in taken:
        small_platform.cudart.cudaFree(pointer)
    for what in (b"allocations", b"comms", b"streams"):
        assert small_platform.host.trlowHostLive(what) == 0
    monkeypatch.undo()
    trlow.Runtime(settings, small.plan, platform=small_platform).close()


def test_memory_that_is_free_and_cannot_be_had_is_an_error_that_says_so(
    settings, small, small_platform
):
    small_platform.host.trlowHostFail(b"cudaMalloc", 1, 2)
    with pytest.raises(CudaError) as caught:
        trlow.Runtime(settings, small.plan, platform=small_platform)
    assert caught.value.rank in range(4)
    assert caught.value.device == caught.value.rank
    wanted, free = small.plan.arena_nbytes, 1 << 20
    assert f"{wanted} bytes were wanted, {free} free" in str(caught.value)


def test_copies_work_from_a_fresh_thread_and_leave_its_device(runtime):
    seen = []

    def work():
        runtime.arenas[2].copy_in("late", np.full(24, 5, np.float32))
        seen.append(runtime.arenas[2].copy_out("late"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert (seen[0] == 5).all()
