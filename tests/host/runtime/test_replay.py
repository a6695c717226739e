from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import trlow
from trlow.errors import UsageError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_capture_runs_nothing_and_replay_does(runtime, small, mode):
    before = [arena.copy_out("early") for arena in runtime.arenas]
    replay = runtime.capture(small.mean_program(), mode)
    warmed = [arena.copy_out("w") for arena in runtime.arenas]
    assert all((array == 0).all() for array in warmed)
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", before[rank])
        arena.copy_in("late", np.full(24, 10.0 * rank, np.float32))
    replay.run(1)
    for arena in runtime.arenas:
        assert (arena.copy_out("early") == 1.5).all()
        assert (arena.copy_out("late") == 15.0).all()


@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_every_step_sees_its_own_input(runtime, small, mode, steps):
    def fill(rank, step, slot):
        slot["data"][:] = (rank + 1) * 10.0**step

    program = small.feed_program()
    if mode == "eager":
        runtime.eager(program, steps, fill)
    else:
        runtime.capture(program, mode).run(steps, fill)
    expected = np.float32(sum(10.0 * 10.0**step for step in range(steps)))
    for arena in runtime.arenas:
        assert (arena.copy_out("w") == expected).all()


def test_fused_equals_staged_equals_eager_byte_for_byte(settings, small):
    def fill(rank, step, slot):
        slot["data"][:] = np.random.default_rng([rank, step]).normal(size=6)

    results = []
    for mode in ("eager", "fused", "staged"):
        with trlow.Runtime(settings, small.plan) as runtime:
            for arena in runtime.arenas:
                arena.copy_in("one", np.array([1.0], np.float32))
            program = small.feed_program()
            if mode == "eager":
                runtime.eager(program, 7, fill)
            else:
                runtime.capture(program, mode).run(7, fill)
            results.append([arena.copy_out("w").tobytes() for arena in runtime.arenas])
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 1


def test_equal_communication_stages_of_two_programs_are_captured_once(runtime, small):
    first = runtime.capture(small.mean_program("first"), "staged")
    second = runtime.capture(small.mean_program("second"), "staged")
    assert runtime.captured == {"DEEP_COMM": 1, "FIRST_COMM": 1}
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
    first.run(1)
    second.run(1)
    for arena in runtime.arenas:
        assert (arena.copy_out("early") == 1.5).all()


def test_fused_launches_once_per_step_and_never_drains(runtime, small):
    replay = runtime.capture(small.feed_program(), "fused")
    replay.run(20, lambda rank, step, slot: None, audit=True)
    assert replay.calls.per_step("cudaGraphLaunch") == 1.0
    assert replay.calls.per_step("cudaStreamSynchronize", "cudaDeviceSynchronize") == 0.0
    assert replay.graphs_per_rank == 2


def test_a_call_that_does_not_belong_in_the_loop_fails_the_audit(runtime, small):
    replay = runtime.capture(small.feed_program(), "fused")

    def fill(rank, step, slot):
        runtime.platform.cudart.cudaPeekAtLastError()

    with pytest.raises(trlow.TrlowError, match="cudaPeekAtLastError"):
        replay.run(3, fill, audit=True)


def test_wrong_use_is_refused_before_anything_runs(runtime, small):
    replay = runtime.capture(small.mean_program())
    with pytest.raises(UsageError, match="-1"):
        replay.run(-1)
    with pytest.raises(UsageError, match="no input"):
        replay.run(1, lambda rank, step, slot: None)
    with pytest.raises(UsageError, match="'graph'"):
        runtime.capture(small.mean_program(), "graph")


def test_progress_over_thousands_of_replays_leaves_memory_flat(runtime, small):
    replay = runtime.capture(small.feed_program(), "fused")
    live = runtime.platform.host.trlowHostLive
    names = (b"streams", b"events", b"graphs", b"execs", b"allocations", b"pinned")
    replay.run(10, lambda rank, step, slot: None)
    before = [live(name) for name in names]
    free = runtime.platform.memory(0)
    replay.run(10_000, lambda rank, step, slot: None)
    assert [live(name) for name in names] == before
    assert runtime.platform.memory(0) == free


def record_until(seen, step, count):
    seen.append((threading.get_ident(), step))
    if len(seen) == count:
        raise StopIteration


def test_progress_is_told_to_the_caller_on_its_own_thread_and_seldom(runtime, small):
    seen = []
    replay = runtime.capture(small.feed_program(), "fused")
    begun = time.monotonic()
    with pytest.raises(StopIteration):
        replay.run(
            1_000_000_000,
            lambda rank, step, slot: None,
            progress=lambda step: record_until(seen, step, 3),
        )
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    steps = [step for _, step in seen]
    assert steps == sorted(set(steps))
    assert time.monotonic() - begun >= 1.5
