"""A rank fails, does not come, or is interrupted: one error, no hang, and the next run works."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.device import Platform
from trlow.errors import CaptureError, RankError, TrlowError, UsageError
from trlow.exchange import add, admit, receive, send

pytestmark = pytest.mark.timeout(90)


def works(runtime, small):
    """Capture and replay a mean on ``runtime`` and check it on every rank."""
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
        arena.copy_in("factor", np.array([0.25], np.float32))
        arena.copy_in("one", np.array([1.0], np.float32))
    replay = runtime.capture(small.mean_program())
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
    replay.run(1)
    return all((arena.copy_out("early") == 1.5).all() for arena in runtime.arenas)


def callback_program(small, callback):
    stage = trlow.Stage(
        "WORK",
        trlow.Stream.COMP_1,
        external=trlow.External("callback", (), (small.plan.range("feature"),), callback),
    )
    return trlow.Program.single("work", (stage, *small.mean_program().phases[0]))


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_rank_that_raises_before_its_launch_ends_all_with_one_error(runtime, small, mode, step):
    replay = runtime.capture(small.feed_program(), mode)

    def fill(rank, current, slot):
        if rank == 1 and current == step + 1:
            message = "no more data"
            raise OSError(message)

    begun = time.monotonic()
    with pytest.raises(RankError, match="no more data") as caught:
        replay.run(10, fill)
    assert time.monotonic() - begun < 10
    assert (caught.value.rank, caught.value.step) == (1, step)
    assert isinstance(caught.value.__cause__, OSError)
    assert replay.closed
    with pytest.raises(trlow.TrlowError, match="closed"):
        replay.run(1)
    assert works(runtime, small)


def test_a_rank_that_never_comes_is_an_error_within_the_deadline(small):
    settings = trlow.Settings(device="host", gpus="0-3", host_devices=4, deadline_s=1.0)
    release = threading.Event()
    with trlow.Runtime(settings, small.plan) as runtime:
        replay = runtime.capture(small.feed_program())

        def fill(rank, step, slot):
            if rank == 2 and step == 3:
                release.wait(4.0)

        begun = time.monotonic()
        with pytest.raises(RankError, match="no progress for 1 s"):
            replay.run(10, fill)
        assert time.monotonic() - begun < 9
        release.set()
        assert works(runtime, small)


def test_a_callback_that_raises_in_capture_names_rank_and_stage(runtime, small):
    armed = threading.Event()

    def callback(rank, stream):
        if armed.is_set() and rank == 3:
            message = "bad callback"
            raise RuntimeError(message)

    program = callback_program(small, callback)
    runtime.eager(program)  # warm, so that the failure falls into the capture
    armed.set()
    with pytest.raises(CaptureError, match="bad callback") as caught:
        runtime.capture(program)
    assert (caught.value.rank, caught.value.stage) == (3, "WORK")
    assert runtime.platform.host.trlowHostLive(b"captures") == 0
    assert works(runtime, small)


def test_an_error_inside_a_group_launches_nothing(runtime, small, monkeypatch):
    from trlow.communicator import Communicators

    program = small.mean_program()
    runtime.eager(program)
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
    prepare = Communicators._prepare

    def broken(self, call):
        def fail():
            message = "between group start and end"
            raise ValueError(message)

        return fail if call.rank == 2 else prepare(self, call)

    monkeypatch.setattr(Communicators, "_prepare", broken)
    with pytest.raises(TrlowError, match="between group start and end"):
        runtime.eager(program)
    monkeypatch.undo()
    for rank, arena in enumerate(runtime.arenas):
        assert (arena.copy_out("early") == rank).all()
    assert works(runtime, small)


def test_ctrl_c_in_the_loop_stops_all_ranks(runtime, small):
    replay = runtime.capture(small.feed_program())
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        replay.run(10_000_000, lambda rank, step, slot: None)
    timer.join()
    assert works(runtime, small)


def test_mismatched_collectives_are_reported_at_issue(runtime, small, monkeypatch):
    from trlow import enqueue

    program = small.mean_program()
    runtime.eager(program)
    honest = enqueue.calls

    def lying(group, ranks):
        for call in honest(group, ranks):
            if call.rank == 1:
                object.__setattr__(call, "count", call.count - 1)
            yield call

    monkeypatch.setattr(enqueue, "calls", lying)
    with pytest.raises(TrlowError, match="rank 1"):
        runtime.eager(program)
    monkeypatch.undo()
    assert works(runtime, small)


ACQUIRING = (
    "cudaStreamCreateWithFlags",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaEventCreateWithFlags",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cudaMemcpyAsync",
    "cudaStreamBeginCapture",
    "cudaStreamEndCapture",
    "cudaStreamWaitEvent",
    "cudaEventRecord",
    "cudaGraphInstantiate",
    "cudaGraphUpload",
    "cudaGraphLaunch",
    "cudaGraphGetNodes",
    "ncclCommInitAll",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
)
COPYING = (
    "cudaDeviceEnablePeerAccess",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cudaStreamEndCapture",
    "cudaGraphGetNodes",
    "cudaGraphNodeGetType",
    "cuGraphMemsetNodeGetParams",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes_v2",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddDependencies_v2",
    "cuGraphDestroyNode",
    "cudaGraphInstantiate",
    "ncclAllReduce",
)
THROUGH_HOST = (
    "cudaStreamCreateWithFlags",
    "cudaEventCreateWithFlags",
    "cudaHostAlloc",
    "cudaStreamIsCapturing",
    "cudaMemcpyAsync",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaStreamEndCapture",
)
LIVE = (b"streams", b"events", b"graphs", b"execs", b"allocations", b"pinned", b"comms", b"modules")


def feeding(runtime, small):
    return runtime.capture(small.feed_program()), lambda rank, step, slot: None


def copying(runtime, small):
    """Ranks send each other a part of what a callback has partly cleared."""
    half = small.early.nbytes // 2
    first, inbox = (
        trlow.Range(small.early.offset + place, half, trlow.F32, name, name)
        for place, name in ((0, "first"), (half, "inbox"))
    )
    token = small.plan.range("one")

    def callback(rank, stream):
        base = runtime.arenas[rank].address(first)
        runtime.platform.cudart.cudaMemsetAsync(base, 0, 400, stream)
        runtime.platform.cudart.cudaMemcpyAsync(base + 400, base, 400, 3, stream)

    external = trlow.External("callback", (), (first,), callback)
    update = trlow.Stream.UPDATE
    stages = (
        trlow.Stage("ADMIT", update, (admit(token, inbox),)),
        trlow.Stage("CLEAR", trlow.Stream.COMP_1, external=external),
        trlow.Stage("SEND", update, (send(inbox, first), receive(token, inbox))),
        trlow.Stage("ADD", update, (add(first, inbox),)),
    )
    return runtime.capture(trlow.Program.single("copying", stages)), None


@pytest.mark.parametrize(
    ("function", "captured", "way"),
    [(name, feeding, "peer") for name in ACQUIRING]
    + [(name, copying, "peer") for name in COPYING]
    + [(name, copying, "host") for name in THROUGH_HOST],
)
def test_failing_any_call_leaves_nothing_behind_and_a_runtime_that_works(
    small, function, captured, way
):
    """Fails the n-th call of ``function`` for every n that a short run reaches."""
    settings = trlow.Settings(
        device="host", gpus="0-1", host_devices=4, deadline_s=10.0, transport=way
    )
    platform = Platform.open(settings)
    host = platform.host
    baseline = [host.trlowHostLive(name) for name in LIVE]
    reached = 0
    for nth in range(1, 400):
        host.trlowHostFail(function.encode(), nth, 2)
        failure = None
        try:
            with trlow.Runtime(settings, small.plan, platform=platform) as runtime:
                replay, fill = captured(runtime, small)
                replay.run(3, fill)
        except TrlowError as error:
            failure = str(error)
        host.trlowHostFail(function.encode(), 0, 0)
        assert [host.trlowHostLive(name) for name in LIVE] == baseline, (nth, failure)
        assert host.trlowHostLive(b"captures") == 0
        if failure is None:
            break
        reached += 1
        assert function in failure
    assert reached > 0
    with trlow.Runtime(settings, small.plan) as runtime:
        for arena in runtime.arenas:
            arena.copy_in("one", np.array([1.0], np.float32))
        replay, fill = captured(runtime, small)
        replay.run(1, fill)


def test_a_capture_that_another_thread_spoils_names_the_rank_whose_device_it_used(runtime, small):
    platform, armed = runtime.platform, threading.Event()

    def synchronize(device):
        with platform.on(device), suppress(TrlowError):
            platform.cudart.cudaDeviceSynchronize()

    def callback(rank, stream):
        if armed.is_set() and rank == 2:
            thread = threading.Thread(target=synchronize, args=(runtime.devices[rank],))
            thread.start()
            thread.join(20)

    program = callback_program(small, callback)
    runtime.eager(program)
    armed.set()
    with pytest.raises(CaptureError) as caught:
        runtime.capture(program)
    assert caught.value.rank == 2
    assert works(runtime, small)


@pytest.mark.parametrize("what", ["close", "run", "capture", "together"])
def test_a_call_that_would_wait_for_itself_is_refused_with_the_step(runtime, small, what):
    replay = runtime.capture(small.feed_program())
    calls = {
        "close": runtime.close,
        "run": lambda: replay.run(1),
        "capture": lambda: runtime.capture(small.mean_program()),
        "together": lambda: runtime.together(lambda rank: rank.index),
    }

    def fill(rank, step, slot):
        if (rank, step) == (0, 3):
            calls[what]()

    with pytest.raises(RankError, match="cannot wait for itself") as caught:
        replay.run(6, fill)
    assert (caught.value.rank, caught.value.step) == (0, 2)
    assert works(runtime, small)


def test_close_stops_a_run_of_another_thread(settings, small):
    runtime = trlow.Runtime(settings, small.plan)
    replay = runtime.capture(small.feed_program())
    errors = []

    def run():
        try:
            replay.run(1_000_000_000, lambda rank, step, slot: None)
        except RankError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    runtime.close()
    thread.join(10)
    assert len(errors) == 1
    assert "stopped by close()" in errors[0]


def test_two_threads_take_turns_on_one_runtime(runtime, small):
    replays = [runtime.capture(small.mean_program()), runtime.capture(small.feed_program())]
    errors = []

    def work(number):
        try:
            for _ in range(30):
                replays[number].run(2)
                runtime.arenas[number].copy_out("early")
        except TrlowError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors


def test_a_rank_that_is_late_for_a_collective_is_said_so(small):
    settings = trlow.Settings(device="host", gpus="0-3", host_devices=4, deadline_s=2.0)
    calls = []

    def callback(rank, stream):
        calls.append(rank)
        if rank == 1 and calls.count(1) == 2:
            time.sleep(5.0)

    with trlow.Runtime(settings, small.plan) as runtime:
        with pytest.raises(TrlowError, match=r"within 2 s|no progress for 2 s"):
            runtime.capture(callback_program(small, callback))
        assert works(runtime, small)


def test_a_program_with_one_slot_is_refused(runtime, small):
    copy = range_op.feed_copy("A", small.plan.span("I_A_DATA"))
    program = trlow.Program.single("one", (trlow.Stage("XFER", trlow.Stream.TRANS, (copy,)),))
    with pytest.raises(TrlowError, match="alternate between slots"):
        runtime.capture(program)


def test_what_is_released_makes_room_for_more(runtime, small):
    for _ in range(40):
        replay = runtime.capture(small.mean_program())
        runtime.release(replay)
        runtime.release(replay)
    assert all(len(member.watch._free) == 4096 for member in runtime._team.members)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", None])
def test_a_number_of_steps_that_is_none_is_refused(runtime, small, steps):
    replay = runtime.capture(small.mean_program())
    with pytest.raises(UsageError, match="steps"):
        replay.run(steps)
    with pytest.raises(UsageError, match="steps"):
        runtime.eager(small.mean_program(), steps)
    replay.run(1)
