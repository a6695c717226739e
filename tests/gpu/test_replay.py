"""The programs of tests/host/runtime on real GPUs: same plan, same calls, same results."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest
from exchange_programs import copying
from memset_cases import (  # noqa: F401  tests that need no rank alone
    test_a_memset_at_the_end_of_a_branch_is_joined,
    test_a_memset_keeps_its_place_between_others,
    test_another_value_stays_a_memset,
    test_two_that_wait_for_one_memset_both_come_behind_it,
    test_zeros_are_stored_by_a_kernel_and_nothing_beside_them,
)

import trlow
from trlow import range_op, transport
from trlow.capture import NODE_TYPES
from trlow.errors import RankError

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(90)]


@pytest.fixture
def runtime(small, gpu_settings):
    with trlow.Runtime(gpu_settings(2), small.plan) as made:
        for arena in made.arenas:
            arena.copy_in("factor", np.array([0.5], np.float32))
            arena.copy_in("one", np.array([1.0], np.float32))
        yield made


def set_gradients(runtime):
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
        arena.copy_in("late", np.full(24, 10.0 * rank, np.float32))


def fill(rank, step, slot):
    slot["data"][:] = np.random.default_rng([rank, step]).normal(size=6)


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_the_mean_over_two_gpus_is_exact(runtime, small, mode):
    replay = runtime.capture(small.mean_program(), mode)
    set_gradients(runtime)
    replay.run(1)
    for arena in runtime.arenas:
        assert (arena.copy_out("early") == 0.5).all()
        assert (arena.copy_out("late") == 5.0).all()


def test_eager_fused_and_staged_agree_byte_for_byte(runtime, small):
    program = small.feed_program()
    results = []
    for mode in ("eager", "fused", "staged"):
        for arena in runtime.arenas:
            arena.copy_in("w", np.zeros(6, np.float32))
        if mode == "eager":
            runtime.eager(program, 7, fill)
        else:
            runtime.capture(program, mode).run(7, fill, audit=True)
        results += [arena.copy_out("w").tobytes() for arena in runtime.arenas]
    assert len(set(results)) == 1


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_ready_made_graph_becomes_a_child_graph(runtime, small, mode):
    cudart = runtime.platform.cudart
    graphs = []
    for rank, arena in enumerate(runtime.arenas):
        with runtime.platform.on(runtime.devices[rank]):
            stream, graph = c_void_p(), c_void_p()
            cudart.cudaStreamCreateWithFlags(byref(stream), 1)
            cudart.cudaStreamBeginCapture(stream, 1)
            cudart.cudaMemcpyAsync(arena.address("feature"), arena.address("early"), 24, 3, stream)
            cudart.cudaStreamEndCapture(stream, byref(graph))
            cudart.cudaStreamDestroy(stream)
            graphs.append(graph.value)
    feature = small.plan.range("feature")
    external = trlow.External("graph", (small.early,), (feature,), tuple(graphs))
    program = trlow.Program.single(
        "child",
        (
            trlow.Stage("WORK", trlow.Stream.COMP_1, external=external),
            trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(feature),)),
        ),
    )
    replay = runtime.capture(program, mode)
    set_gradients(runtime)
    replay.run(2)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 1).all()
    assert NODE_TYPES[4] == "graph"
    for rank, graph in enumerate(graphs):
        with runtime.platform.on(runtime.devices[rank]):
            cudart.cudaGraphDestroy(graph)


def test_a_rank_that_raises_ends_the_other_and_the_next_run_works(runtime, small):
    replay = runtime.capture(small.feed_program())

    def failing(rank, step, slot):
        if rank == 1 and step == 4:
            message = "no more data"
            raise OSError(message)

    with pytest.raises(RankError, match="no more data") as caught:
        replay.run(10, failing)
    assert (caught.value.rank, caught.value.step) == (1, 3)
    test_the_mean_over_two_gpus_is_exact(runtime, small, "fused")


def test_the_callers_device_is_as_before(runtime, small):
    before, after = c_int(), c_int()
    runtime.platform.cudart.cudaGetDevice(byref(before))
    runtime.capture(small.mean_program()).run(1)
    runtime.arenas[1].copy_out("early")
    runtime.platform.cudart.cudaGetDevice(byref(after))
    assert before.value == after.value


@pytest.mark.parametrize("way", ["peer", "host"])
@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
def test_two_gpus_sum_by_copies(gpu_settings, small, monkeypatch, mode, way):
    """Each sends the first half of a range to the second half of the other's, 20 times."""
    monkeypatch.setattr(transport, "PART_NBYTES", 400)
    program = copying(small)
    with trlow.Runtime(gpu_settings(2, transport=way), small.plan) as runtime:
        for arena in runtime.arenas:
            arena.copy_in("one", np.array([1.0], np.float32))
        replay = None if mode == "eager" else runtime.capture(program, mode)
        set_gradients(runtime)
        if replay is None:
            runtime.eager(program, 20)
        else:
            replay.run(20)
        for arena in runtime.arenas:
            found = arena.copy_out("early")
            assert (found[:500] == 2.0**19).all()
            assert (found[500:] == 2.0**18).all()
