"""Tests of memsets that somebody else captures: kernels, with the same bytes in the same order.

For host/ and gpu/, which have the fixtures ``runtime`` and ``small`` each.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import trlow
from trlow.device import Events, Streams
from trlow.range_op import sum_all_reduce

D2D = 3


def captured(runtime, small, body, mode="fused"):
    """A program whose one stage is ``body(cudart, base, stream)`` on the rank's "early"."""
    span = small.plan.range("early")

    def callback(rank, stream):
        body(runtime.platform.cudart, runtime.arenas[rank].address("early"), stream)

    external = trlow.External("callback", (small.plan.range("late"),), (span,), callback)
    stage = trlow.Stage("WORK", trlow.Stream.COMP_1, external=external)
    return runtime.capture(trlow.Program.single("external", (stage,)), mode)


def types_of(runtime):
    """Node types of everything that rank 0 has captured."""
    graphs = [each[0] for each in runtime._fused] + [runtime._staged[0]]
    return [kind for each in graphs for found in each.nodes.values() for kind in found]


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize(("first", "nbytes"), [(0, 4000), (1, 1), (3, 1), (5, 777), (16, 64)])
def test_zeros_are_stored_by_a_kernel_and_nothing_beside_them(runtime, small, mode, first, nbytes):
    replay = captured(
        runtime,
        small,
        lambda cudart, base, stream: cudart.cudaMemsetAsync(base + first, 0, nbytes, stream),
        mode,
    )
    assert "memset" not in types_of(runtime)
    assert "kernel" in types_of(runtime)
    for arena in runtime.arenas:
        arena.copy_in("early", np.full(1000, np.nan, np.float32))
    replay.run(1)
    expected = np.full(1000, np.nan, np.float32).view(np.uint8)
    expected[first : first + nbytes] = 0
    for arena in runtime.arenas:
        assert np.array_equal(arena.copy_out("early").view(np.uint8), expected)


def test_another_value_stays_a_memset(runtime, small):
    replay = captured(
        runtime, small, lambda cudart, base, stream: cudart.cudaMemsetAsync(base, 1, 8, stream)
    )
    assert types_of(runtime).count("memset") == 1
    replay.run(1)
    assert (runtime.arenas[0].copy_out("early")[:2].view(np.uint8) == 1).all()


def test_a_memset_keeps_its_place_between_others(runtime, small):
    """Copy, clear, copy a part, clear a part: a wrong order leaves other bytes."""
    late = runtime.arenas[0].address("late") - runtime.arenas[0].address("early")

    def body(cudart, base, stream):
        cudart.cudaMemcpyAsync(base, base + late, 96, D2D, stream)
        cudart.cudaMemsetAsync(base, 0, 48, stream)
        cudart.cudaMemsetAsync(base + 40, 0, 40, stream)
        cudart.cudaMemcpyAsync(base, base + late, 24, D2D, stream)
        cudart.cudaMemsetAsync(base + 8, 0, 4, stream)

    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("late", np.full(24, 10.0 * rank, np.float32))
    replay = captured(runtime, small, body)
    assert types_of(runtime).count("memcpy") == 2
    assert "memset" not in types_of(runtime)
    replay.run(3)
    for rank, arena in enumerate(runtime.arenas):
        expected = np.full(24, 10 * rank, np.float32)
        expected[:20] = 0
        expected[:6] = 10 * rank
        expected[2] = 0
        assert np.array_equal(arena.copy_out("early")[:24], expected)


@contextmanager
def side_streams(runtime):
    """A stream and events of the test's own on each rank."""
    made = runtime.together(
        lambda rank: (Streams(runtime.platform, ["side"]), Events(runtime.platform))
    )
    yield [streams["side"] for streams, _ in made], [events for _, events in made]
    runtime.together(lambda rank: [each.close() for each in made[rank.index]])


def fork(cudart, events, name, origin, other):
    cudart.cudaEventRecord(events[name], origin)
    cudart.cudaStreamWaitEvent(other, events[name], 0)


def test_two_that_wait_for_one_memset_both_come_behind_it(runtime, small):
    """Each copies what was cleared, on a stream of its own."""

    def body(cudart, base, stream, side, events):
        cudart.cudaMemcpyAsync(base, base + late, 96, D2D, stream)
        cudart.cudaMemsetAsync(base, 0, 48, stream)
        fork(cudart, events, "fork", stream, side)
        cudart.cudaMemcpyAsync(base + 400, base, 96, D2D, side)
        cudart.cudaMemcpyAsync(base + 800, base, 96, D2D, stream)
        fork(cudart, events, "join", side, stream)

    late = runtime.arenas[0].address("late") - runtime.arenas[0].address("early")
    with side_streams(runtime) as (sides, events):

        def callback(rank, stream):
            base = runtime.arenas[rank].address("early")
            body(runtime.platform.cudart, base, stream, sides[rank], events[rank])

        external = trlow.External("callback", (small.plan.range("late"),), (small.early,), callback)
        stage = trlow.Stage("WORK", trlow.Stream.COMP_1, external=external)
        replay = runtime.capture(trlow.Program.single("both", (stage,)))
        assert "memset" not in types_of(runtime)
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("late", np.full(24, rank + 1.0, np.float32))
        replay.run(3)
        for rank, arena in enumerate(runtime.arenas):
            expected = np.full(24, rank + 1.0, np.float32)
            expected[:12] = 0
            found = arena.copy_out("early")
            for first in (0, 100, 200):
                assert np.array_equal(found[first : first + 24], expected)


def test_a_memset_at_the_end_of_a_branch_is_joined(runtime, small):
    """Two streams, each ending in a memset, ahead of a collective."""
    span = small.early
    with side_streams(runtime) as (sides, events):

        def callback(rank, stream):
            cudart, base = runtime.platform.cudart, runtime.arenas[rank].address("early")
            fork(cudart, events[rank], "fork", stream, sides[rank])
            cudart.cudaMemsetAsync(base, 0, 40, sides[rank])
            cudart.cudaMemsetAsync(base + 40, 0, 40, stream)
            fork(cudart, events[rank], "join", sides[rank], stream)

        external = trlow.External("callback", (), (span,), callback)
        stages = (
            trlow.Stage("WORK", trlow.Stream.COMP_1, external=external),
            trlow.Stage("SUM", trlow.Stream.UPDATE, (sum_all_reduce(span),)),
        )
        replay = runtime.capture(trlow.Program.single("branches", stages))
        assert "memset" not in types_of(runtime)
        for arena in runtime.arenas:
            arena.copy_in("early", np.ones(1000, np.float32))
        replay.run(1)
        for arena in runtime.arenas:
            assert not arena.copy_out("early")[:20].any()
            assert (arena.copy_out("early")[20:] == len(runtime.arenas)).all()
