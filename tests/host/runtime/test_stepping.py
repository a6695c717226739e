"""One replayed step for each call, and what happens between the calls."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.binding.cudart import cudaHostFn_t
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
def fill(small):
    def before(rank, step, payload):
        source = payload[rank.index]
        rank.platform.cudart.cudaMemcpyAsync(
            rank.arena.base + small.early.offset,
            source.ctypes.data,
            source.nbytes,
            HOST_TO_DEVICE,
            rank.streams[trlow.Stream.UPDATE],
        )

    return before


@pytest.fixture
def stepper(runtime, small, program, fill):
    """Each step sums ``payload * (rank + 1)`` over four ranks."""
    stepper = Stepper([runtime.capture(program)], fill, small.early)
    yield stepper
    with suppress(trlow.TrlowError):  # what a test has raised already
        stepper.end()
    stepper.close()


@pytest.fixture
def slow_stepper(runtime, small, fill):
    """A function that makes a stepper, each step of which does ``work(rank)`` on every device."""
    with ExitStack() as stack:

        def made(work):
            functions = [cudaHostFn_t(lambda _, rank=rank: work(rank)) for rank in range(4)]
            stack.callback(functions.clear)  # graphs have their addresses

            def body(rank, stream):
                runtime.platform.cudart.cudaLaunchHostFunc(stream, functions[rank], None)

            external = trlow.External("callback", (small.early,), (small.early,), body)
            stages = (
                trlow.Stage("WORK", trlow.Stream.UPDATE, (), external),
                trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(small.early),)),
            )
            replay = runtime.capture(trlow.Program.single("slow sum", stages))
            stepper = Stepper([replay], fill, small.early)
            stack.callback(stepper.close)
            stack.callback(stepper.end)
            return stepper

        yield made


def payload(small, value):
    return [np.full(small.early.count, value * (rank + 1), np.float32) for rank in range(4)]


def test_every_step_has_its_own_result(stepper, small):
    results = [stepper.step(payload(small, value)) for value in range(20)]
    assert [result.values()[0] for result in results] == [10.0 * value for value in range(20)]


def test_a_step_that_must_not_wait_is_launched_when_it_returns(runtime, small, program, fill):
    seen = []

    def before(rank, step, given):
        time.sleep(0.01)
        fill(rank, step, given)
        seen.append(step)

    made = Stepper([runtime.capture(program)], before, small.early, ahead=0)
    for step in range(6):
        made.step(payload(small, step))
        assert seen.count(step) == 4
    made.end()
    made.close()


@pytest.mark.parametrize("back", [0, 1])
def test_results_are_those_of_their_steps_over_runs_of_any_length(slow_stepper, small, back):
    """The steps of a run alternate between two events, whichever step it began with."""
    made = slow_stepper(lambda _: time.sleep(0.005))
    for value, steps in enumerate([1, 2, 3, 5, 1, 4]):
        results = []
        for number in range(steps):
            results.append(made.step(payload(small, 10 * value + number)))
            if number >= back:
                got = results[number - back].values()[0]
                assert got == 10.0 * (10 * value + number - back)
        made.end()
        assert [each.values()[0] for each in results] == [
            10.0 * (10 * value + number) for number in range(steps)
        ]


def test_an_older_result_is_there_while_newer_steps_run(slow_stepper, small):
    """The step two further on has taken its event."""
    gate, seen, went_on = threading.Event(), [], []

    def work(rank):
        if rank == 0:  # whose stream is behind its first two steps by then
            seen.append(None)
            if len(seen) > 2:
                went_on.append(gate.wait(10))

    made = slow_stepper(work)
    seen.clear()
    results = [made.step(payload(small, value)) for value in range(4)]
    made._await_launch(4)
    assert [results[value].values()[0] for value in (0, 1)] == [0.0, 10.0]
    assert not went_on
    gate.set()
    made.end()
    assert [each.values()[0] for each in results] == [0.0, 10.0, 20.0, 30.0]


def test_a_look_at_a_step_that_runs_leaves_no_error_behind(slow_stepper, small):
    made = slow_stepper(lambda _: time.sleep(0.05))
    with trlow.binding.clib.counting() as counted:
        assert made.step(payload(small, 3)).values()[0] == 30.0
    calls = {name: number for (_, name), number in counted.items()}
    looks = calls["cudaEventQuery"]
    assert looks > 1
    assert calls["cudaGetLastError"] in (looks - 1, looks)  # the last may have found it done


class Interrupted:
    """A queue with a Ctrl-C ahead of one item or behind it."""

    def __init__(self, queue, *, behind):
        self.queue, self.behind, self.now = queue, behind, True

    def put(self, item):
        if self.now and not self.behind:
            self.now = False
            raise KeyboardInterrupt
        self.queue.put(item)
        if self.now:
            self.now = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_a_ctrl_c_while_a_step_is_handed_out_takes_it_or_leaves_it(
    slow_stepper, small, behind, read
):
    """The caller cannot know which; all other steps have their own results."""
    made = slow_stepper(lambda _: None)
    results = [made.step(payload(small, value)) for value in range(3)]
    made._entry = Interrupted(made._entry, behind=behind)
    with pytest.raises(KeyboardInterrupt):
        made.step(payload(small, 999))
    for value in range(3, RESULTS + 10):
        results.append(made.step(payload(small, value)))
        if read:
            assert results[-1].values()[0] == 10.0 * value
    made._entry = Interrupted(made._entry, behind=behind)
    with pytest.raises(KeyboardInterrupt) as caught:  # which keeps the result of that step alive
        made.step(payload(small, 999))
    made._entry = made._entry.queue
    made.end()
    assert [each.values()[0] for each in results] == [10.0 * v for v in range(RESULTS + 10)]
    del caught


@pytest.fixture
def never_begun(stepper, small, monkeypatch):
    """A stepper whose first run a Ctrl-C has kept from beginning."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            stepper.step(payload(small, 1))
    return stepper


def test_a_run_that_never_began_leaves_room_for_another(never_begun, small):
    assert never_begun.step(payload(small, 2)).values()[0] == 20.0
    never_begun.end()


def test_a_run_that_never_began_has_no_end(never_begun):
    never_begun.end()


def test_a_run_that_never_began_is_refused_where_the_runtime_is_closed(never_begun, runtime, small):
    runtime.close()
    with pytest.raises(trlow.TrlowError, match="closed"):
        never_begun.step(payload(small, 2))


def test_what_is_copied_behind_a_step_is_ahead_of_its_end(runtime, program):
    log, prepared = [], runtime.capture(program).prepared(0)
    prepared._launches = ((("step", (lambda: log.append("step"),)),),)
    prepared._records = ((lambda: log.append("end"),),) * 2
    prepared.launch(0, [lambda: log.append("copy")])
    assert log == ["step", "copy", "end"]


def test_a_step_of_one_rank_that_fails_takes_the_replay_with_it(settings, small, program):
    def before(rank, step, payload):
        if step == 1:
            message = "no batch"
            raise ValueError(message)

    with trlow.Runtime(replace(settings, gpus="0"), small.plan) as runtime:
        replay = runtime.capture(program)
        stepper = Stepper([replay], before, small.early)
        results = [stepper.step(None)]
        with pytest.raises(trlow.TrlowError, match="no batch"):
            for _ in range(4):
                results.append(stepper.step(None))
        assert replay.closed
        for result in results[1:]:
            with pytest.raises(UsageError):
                result.values()
        stepper.close()


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
