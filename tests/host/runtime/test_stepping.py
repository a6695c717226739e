"""One replayed step for each call, and what happens between the calls."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.errors import UsageError
from trlow.stepping import RESULTS, Stepper

pytestmark = pytest.mark.timeout(60)
HOST_TO_DEVICE = 1


@pytest.fixture
def program(small):
    return trlow.Program.single(
        "sum",
        (trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(small.early),)),),
    )


@pytest.fixture
def runtime_with(settings, small):
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(
            trlow.Runtime(replace(settings, **changes), small.plan)
        )


@pytest.fixture
def stepper(runtime, small, program):
    """Each step sums ``payload * (rank + 1)`` over four ranks."""

    def before(rank, step, payload):
        source = payload[rank.index]
        rank.platform.cudart.cudaMemcpyAsync(
            rank.arena.base + small.early.offset,
            source.ctypes.data,
            source.nbytes,
            HOST_TO_DEVICE,
            rank.streams[trlow.Stream.UPDATE],
        )

    stepper = Stepper([runtime.capture(program)], before, small.early)
    yield stepper
    with suppress(trlow.TrlowError):  # what a test has raised already
        stepper.end()
    stepper.close()


def payload(small, value):
    return [np.full(small.early.count, value * (rank + 1), np.float32) for rank in range(4)]


def test_every_step_has_its_own_result(stepper, small):
    results = [stepper.step(payload(small, value)) for value in range(20)]
    assert [result.values()[0] for result in results] == [10.0 * value for value in range(20)]


def test_results_are_those_of_their_steps_over_runs_of_any_length(stepper, small):
    """The steps of a run alternate between two events, whichever step it began with."""
    for value, steps in enumerate([1, 2, 3, 5, 1, 4]):
        for number in range(steps):
            result = stepper.step(payload(small, 10 * value + number))
            if number % 2 == 0:
                assert result.values()[0] == 10.0 * (10 * value + number)
        stepper.end()
        assert result.values()[0] == 10.0 * (10 * value + steps - 1)


def test_an_older_result_is_there_while_newer_steps_run(stepper, small):
    """Whoever reads it may find its event taken by the step two further on."""
    results = [stepper.step(payload(small, value)) for value in range(RESULTS)]
    for value in (0, RESULTS - 3, RESULTS - 1, RESULTS - 2):
        assert results[value].values()[0] == 10.0 * value


def test_a_staged_replay_gives_no_result(runtime, small, program):
    with pytest.raises(UsageError, match="fused"):
        Stepper([runtime.capture(program, mode="staged")], lambda *_: None, small.early)


def test_results_that_nobody_read_are_kept_beyond_the_ring_and_the_end(stepper, small):
    results = [stepper.step(payload(small, value)) for value in range(RESULTS + 30)]
    stepper.end()
    stepper.close()
    assert [result.values()[0] for result in results] == [10.0 * v for v in range(RESULTS + 30)]


def test_a_result_that_was_not_read_before_the_end_of_everything_says_so(stepper, small):
    result = stepper.step(payload(small, 3))
    stepper.close()
    with pytest.raises(UsageError, match="result of step 0 was not read"):
        result.values()


def test_results_are_read_again_in_order_where_one_wait_was_interrupted(
    stepper, small, monkeypatch
):
    results = [stepper.step(payload(small, value)) for value in range(RESULTS)]

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stepper, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stepper.step(payload(small, RESULTS))
    results += [stepper.step(payload(small, value)) for value in range(RESULTS, RESULTS + 9)]
    stepper.end()
    assert [result.values()[0] for result in results] == [10.0 * v for v in range(RESULTS + 9)]


def test_a_caller_may_think_longer_than_the_deadline(runtime_with, small, program):
    runtime = runtime_with(deadline_s=0.5)
    stepper = Stepper([runtime.capture(program)], lambda *_: None, small.early)
    for _ in range(2):
        stepper.step(None)
        time.sleep(1.2)
    stepper.end()
    stepper.close()


def test_a_rank_that_does_not_come_back_ends_within_the_deadline(runtime_with, small, program):
    runtime = runtime_with(deadline_s=0.5)

    def before(rank, step, payload):
        while rank.index == 2 and step == 3 and not rank.status.stop:
            time.sleep(0.01)

    stepper = Stepper([runtime.capture(program)], before, small.early)
    began = time.monotonic()
    with pytest.raises(trlow.TrlowError, match="no progress"):
        for _ in range(8):
            stepper.step(None)
        stepper.end()
    stepper.close()
    assert time.monotonic() - began < 15


def test_a_failure_before_a_step_is_raised_by_the_next_call(runtime, stepper, small):
    def before(rank, step, payload):
        if rank.index == 3 and step == 5:
            raise ValueError("no such batch")

    stepper._before = before
    with pytest.raises(trlow.TrlowError, match=r"no such batch") as caught:
        for _ in range(50):
            stepper.step(None)
    assert (caught.value.rank, caught.value.step) == (3, 5)
    with pytest.raises(trlow.TrlowError, match="closed"):
        stepper.step(None)


def test_the_runtime_is_taken_while_steps_are_handed_out_and_free_afterwards(
    runtime, stepper, small
):
    stepper.step(payload(small, 1))
    with pytest.raises(trlow.TrlowError, match="stepper"):
        runtime.arenas[1].copy_out("early")
    stepper.end()
    runtime.arenas[1].copy_out("early")
    assert stepper.step(payload(small, 2)).values()[0] == 20


def test_closing_the_runtime_ends_a_stepper_that_was_forgotten(runtime_with, small, program):
    runtime = runtime_with()
    stepper = Stepper([runtime.capture(program)], lambda *_: None, small.early)
    stepper.step(None)
    runtime.close()
    with pytest.raises(trlow.TrlowError):
        stepper.step(None)
    stepper.close()


def test_calls_of_a_step_are_those_of_the_loop_and_one_copy(runtime, stepper, small):
    stepper.step(payload(small, 1)).values()
    with trlow.binding.clib.counting() as counted:
        for value in range(10):
            stepper.step(payload(small, value))
        stepper.end()
    calls = {name for _, name in counted}
    assert not calls & {"cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaStreamSynchronize"}


def test_nobody_waits_for_a_stepper_that_took_the_runtime_before_them(runtime, stepper, small):
    """They waited for a call that ends; the stepper, which waited too, comes first."""
    going = threading.Event()

    def late(function):
        with suppress(trlow.TrlowError):  # refused, or done before the stepper
            function()

    busy = threading.Thread(target=lambda: runtime.together(lambda _: going.wait(20)))
    opening = threading.Thread(target=lambda: stepper.step(payload(small, 1)))
    others = [
        threading.Thread(target=late, args=(lambda: runtime.arenas[0].copy_out("early"),))
        for _ in range(4)
    ]
    for thread in (busy, opening, *others):
        thread.start()
        time.sleep(0.1)
    going.set()
    for thread in (busy, opening, *others):
        thread.join(10)
        assert not thread.is_alive()
