"""Stages that somebody else enqueues: callbacks and ready-made graphs."""

from __future__ import annotations

import threading
from ctypes import byref, c_void_p
from dataclasses import replace

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.binding.cudart import cudaHostFn_t
from trlow.stepping import Stepper

pytestmark = pytest.mark.timeout(60)


def program_with(small, external, stream=trlow.Stream.COMP_1):
    return trlow.Program.single(
        "external",
        (
            trlow.Stage("WORK", stream, external=external),
            trlow.Stage(
                "COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(small.plan.range("feature")),)
            ),
        ),
    )


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_callback_enqueues_on_the_stream_of_its_rank(runtime, small, mode):
    cudart = runtime.platform.cudart
    threads = [set() for _ in range(4)]

    def callback(rank, stream):
        threads[rank].add(threading.get_ident())
        source = runtime.arenas[rank].address("early")
        target = runtime.arenas[rank].address("feature")
        cudart.cudaMemcpyAsync(target, source, 24, 3, stream)

    external = trlow.External("callback", (small.early,), (small.plan.range("feature"),), callback)
    replay = runtime.capture(program_with(small, external), mode)
    replay.run(1)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 6).all()
    assert all(len(found) == 1 for found in threads)
    assert len(set.union(*threads)) == 4


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_host_function_is_a_stage_of_the_program(runtime, small, mode):
    views = [arena.view("feature") for arena in runtime.arenas]

    def body(rank):
        def run(_):
            views[rank][:] = 2.0**rank

        return cudaHostFn_t(run)

    functions = [body(rank) for rank in range(4)]

    def callback(rank, stream):
        runtime.platform.cudart.cudaLaunchHostFunc(stream, functions[rank], None)

    external = trlow.External("callback", (), (small.plan.range("feature"),), callback)
    replay = runtime.capture(program_with(small, external), mode)
    replay.run(3)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 15).all()


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_host_function_runs_once_in_every_replayed_step(runtime, small, mode):
    """It counts in the arena: the number of the step, times the rank's own share, is summed."""
    cudart, host = runtime.platform.cudart, runtime.platform.host
    feature, early = small.plan.range("feature"), small.early
    steps = [arena.view("early") for arena in runtime.arenas]
    shares = [arena.view("feature") for arena in runtime.arenas]
    seen = [[] for _ in runtime.arenas]

    def body(rank):
        def run(_):
            seen[rank].append(float(shares[rank][0]))  # the sum that the step before left
            steps[rank][0] += 1
            shares[rank][:] = steps[rank][0] * (rank + 1)

        return cudaHostFn_t(run)

    functions = [body(rank) for rank in range(4)]

    def callback(rank, stream):
        cudart.cudaLaunchHostFunc(stream, functions[rank], None)

    external = trlow.External("callback", (early,), (early, feature), callback)
    replay = runtime.capture(program_with(small, external), mode)
    for arena in runtime.arenas:
        arena.copy_in("early", np.zeros(1000, np.float32))
        arena.copy_in("feature", np.zeros(6, np.float32))
    for each in seen:
        each.clear()  # the warm-up ran it, too
    calls = host.trlowHostCalls(b"cudaLaunchHostFunc")
    replay.run(5)
    assert host.trlowHostCalls(b"cudaLaunchHostFunc") == calls
    for rank, arena in enumerate(runtime.arenas):
        assert seen[rank] == [0, 10, 20, 30, 40]
        assert steps[rank][0] == 5
        assert (arena.copy_out("feature") == 50).all()


def test_a_graph_with_a_host_function_becomes_a_child_graph(runtime, small):
    cudart = runtime.platform.cudart
    views = [arena.view("feature") for arena in runtime.arenas]
    functions, graphs = [], []
    for rank, view in enumerate(views):

        def run(_, view=view, value=2.0**rank):
            view[:] = value

        functions.append(cudaHostFn_t(run))
        with runtime.platform.on(runtime.devices[rank]):
            stream, graph = c_void_p(), c_void_p()
            cudart.cudaStreamCreateWithFlags(byref(stream), 1)
            cudart.cudaStreamBeginCapture(stream, 1)
            cudart.cudaLaunchHostFunc(stream, functions[rank], None)
            cudart.cudaStreamEndCapture(stream, byref(graph))
            cudart.cudaStreamDestroy(stream)
            graphs.append(graph.value)
    external = trlow.External("graph", (), (small.plan.range("feature"),), tuple(graphs))
    replay = runtime.capture(program_with(small, external))
    replay.run(3)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 15).all()
    for rank, graph in enumerate(graphs):
        with runtime.platform.on(runtime.devices[rank]):
            cudart.cudaGraphDestroy(graph)


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
    external = trlow.External(
        "graph", (small.early,), (small.plan.range("feature"),), tuple(graphs)
    )
    replay = runtime.capture(program_with(small, external), mode)
    replay.run(2)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 6).all()
    for rank, graph in enumerate(graphs):
        with runtime.platform.on(runtime.devices[rank]):
            cudart.cudaGraphDestroy(graph)


def no_batch(rank, step, payload):
    message = "no batch"
    raise ValueError(message)


def test_a_child_graph_is_there_again_after_a_step_of_one_rank_that_failed(settings, small):
    with trlow.Runtime(replace(settings, gpus="0"), small.plan) as runtime:
        cudart, graph = runtime.platform.cudart, c_void_p()
        cudart.cudaGraphCreate(byref(graph), 0)
        external = trlow.External(
            "graph", (small.early,), (small.plan.range("feature"),), (graph.value,)
        )
        program = program_with(small, external)
        replay = runtime.capture(program)
        stepper = Stepper([replay], no_batch)
        with pytest.raises(trlow.TrlowError, match="no batch"):
            stepper.step(None)
        assert replay.closed
        runtime.eager(program)
        runtime.capture(program).run(2)
        cudart.cudaGraphDestroy(graph)


def test_warm_up_of_a_callback_leaves_persistent_memory_as_it_was(runtime, small):
    """The callback writes weights; warming and capturing it must not show."""
    cudart = runtime.platform.cudart
    weights = np.arange(6, dtype=np.float32)
    for arena in runtime.arenas:
        arena.copy_in("w", weights)

    def callback(rank, stream):
        cudart.cudaMemcpyAsync(
            runtime.arenas[rank].address("w"), runtime.arenas[rank].address("early"), 24, 3, stream
        )

    external = trlow.External("callback", (small.early,), (small.plan.range("w"),), callback)
    replay = runtime.capture(program_with(small, external))
    for arena in runtime.arenas:
        assert (arena.copy_out("w") == weights).all()
    replay.run(1)
    for rank, arena in enumerate(runtime.arenas):
        assert (arena.copy_out("w") == rank).all()


def test_warm_up_of_a_collective_leaves_persistent_memory_as_it_was(runtime, small):
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("w", np.full(6, rank, np.float32))
    program = trlow.Program.single(
        "broadcast",
        (
            trlow.Stage(
                "B", trlow.Stream.UPDATE, (range_op.broadcast(small.plan.range("w"), root=2),)
            ),
        ),
    )
    replay = runtime.capture(program)
    assert [arena.copy_out("w")[0] for arena in runtime.arenas] == [0, 1, 2, 3]
    replay.run(1)
    assert [arena.copy_out("w")[0] for arena in runtime.arenas] == [2, 2, 2, 2]


def test_a_callback_may_enqueue_more_on_one_rank_than_on_another(runtime, small):
    """As compiled code does, which takes the kernels that suit its device."""
    cudart = runtime.platform.cudart

    def callback(rank, stream):
        source, target = (runtime.arenas[rank].address(name) for name in ("early", "feature"))
        for _ in range(1 + rank):
            cudart.cudaMemcpyAsync(target, source, 24, 3, stream)

    external = trlow.External("callback", (small.early,), (small.plan.range("feature"),), callback)
    runtime.capture(program_with(small, external)).run(1)
    for arena in runtime.arenas:
        assert (arena.copy_out("feature") == 6).all()
