"""Many replays, late ranks, large graphs: nothing hangs, nothing grows, nothing drifts apart."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

import trlow
from trlow import range_op

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(110)]
SMALL_NODES = 500


def many_nodes(small, nodes):
    """Two all-reduces with ``nodes`` small kernels around them, over two streams."""
    scales = tuple(range_op.scale(small.early, small.plan.range("one")) for _ in range(nodes // 4))
    others = tuple(range_op.scale(small.late, small.plan.range("one")) for _ in range(nodes // 4))
    stages = (
        trlow.Stage("A", trlow.Stream.COMP_1, scales),
        trlow.Stage("B", trlow.Stream.COMP_2, others),
        trlow.Stage(
            "DEEP_COMM",
            trlow.Stream.UPDATE,
            (range_op.mean_all_reduce(small.early, factor=small.factor),),
        ),
        trlow.Stage("C", trlow.Stream.COMP_1, scales),
        trlow.Stage("D", trlow.Stream.COMP_2, others),
        trlow.Stage(
            "FIRST_COMM",
            trlow.Stream.UPDATE,
            (range_op.mean_all_reduce(small.late, factor=small.factor),),
        ),
    )
    return trlow.Program.single(f"{nodes} nodes", stages)


@pytest.fixture
def runtime(small, gpu_settings):
    with trlow.Runtime(gpu_settings(2, deadline_s=30.0), small.plan) as made:
        for arena in made.arenas:
            arena.copy_in("factor", np.array([0.5], np.float32))
            arena.copy_in("one", np.array([1.0], np.float32))
        yield made


def fill_gradients(runtime):
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
        arena.copy_in("late", np.full(24, 10.0 * rank, np.float32))


def check_means(runtime):
    for arena in runtime.arenas:
        assert (arena.copy_out("early") == 0.5).all()
        assert (arena.copy_out("late") == 5.0).all()


def memory(runtime):
    """(device bytes in use on each rank, host peak in KiB)."""
    used = []
    for device in runtime.devices:
        free, total = runtime.platform.memory(device)
        used.append(total - free)
    return used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def replay_flat(runtime, replay, steps):
    fill_gradients(runtime)
    replay.run(200)
    before_device, before_host = memory(runtime)
    replay.run(steps)
    after_device, after_host = memory(runtime)
    check_means(runtime)
    assert after_device == before_device
    assert after_host - before_host < 8 * 1024  # KiB; a leak of one event a step would be more


def scaled(device, steps):
    """All steps on GPUs; a twentieth on the host device, where this file only proves itself."""
    return steps if device == "cuda" else max(steps // 20, 20)


def test_twenty_thousand_replays_of_500_nodes(runtime, small, device):
    replay_flat(runtime, runtime.capture(many_nodes(small, SMALL_NODES)), scaled(device, 20_000))


def test_three_thousand_replays_of_4000_nodes(runtime, small, device):
    replay_flat(runtime, runtime.capture(many_nodes(small, 4_000)), scaled(device, 3_000))


def test_one_rank_late_by_ten_milliseconds_at_every_step(runtime, small, device):
    replay = runtime.capture(small.feed_program())

    def fill(rank, step, slot):
        slot["data"][:] = 1.0
        if rank == 1:
            time.sleep(0.010)

    steps = scaled(device, 1_500)
    replay.run(steps, fill)
    for arena in runtime.arenas:
        assert (arena.copy_out("w") == 2.0 * steps).all()


def test_staged_replays_with_many_nodes_agree(runtime, small, device):
    replay = runtime.capture(many_nodes(small, SMALL_NODES), "staged")
    fill_gradients(runtime)
    replay.run(scaled(device, 2_000))
    check_means(runtime)
