"""Failures on real GPUs: one error, in time, and the next run works."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from ctypes import byref, c_int, c_void_p
from pathlib import Path

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.communicator import Communicators
from trlow.errors import CaptureError, RankError, TrlowError

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(100)]
ROOT = str(Path(trlow.__file__).parents[1])


@pytest.fixture
def runtime(small, gpu_settings):
    with trlow.Runtime(gpu_settings(2, deadline_s=20.0), small.plan) as made:
        yield made


def works(runtime, small):
    for arena in runtime.arenas:
        arena.copy_in("factor", np.array([0.5], np.float32))
    replay = runtime.capture(small.mean_program())
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
    replay.run(3)
    return all((arena.copy_out("early") == 0.5).all() for arena in runtime.arenas)


def nothing(rank, step, slot):
    pass


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("step", [0, 7])
def test_an_exception_in_rank_1_before_its_launch(runtime, small, mode, step):
    replay = runtime.capture(small.feed_program(), mode)

    def fill(rank, current, slot):
        if rank == 1 and current == step + 1:
            raise OSError("no more data")

    begun = time.monotonic()
    with pytest.raises(RankError, match="no more data") as caught:
        replay.run(20, fill)
    assert time.monotonic() - begun < 10
    assert (caught.value.rank, caught.value.step) == (1, step)
    assert works(runtime, small)


def test_an_exception_in_a_callback_during_capture(runtime, small):
    armed = threading.Event()

    def callback(rank, stream):
        if armed.is_set() and rank == 1:
            raise RuntimeError("bad callback")

    feature = small.plan.range("feature")
    external = trlow.External("callback", (), (feature,), callback)
    program = trlow.Program.single(
        "work",
        (
            trlow.Stage("WORK", trlow.Stream.COMP_1, external=external),
            trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(feature),)),
        ),
    )
    runtime.eager(program)
    armed.set()
    with pytest.raises(CaptureError, match="bad callback") as caught:
        runtime.capture(program)
    assert (caught.value.rank, caught.value.stage) == (1, "WORK")
    assert works(runtime, small)


def test_an_exception_between_group_start_and_end(runtime, small, monkeypatch):
    program = small.mean_program()
    runtime.eager(program)
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
    prepare = Communicators._prepare

    def broken(self, call):
        def fail():
            raise ValueError("inside the group")

        return fail if call.rank == 1 else prepare(self, call)

    monkeypatch.setattr(Communicators, "_prepare", broken)
    with pytest.raises(TrlowError, match="inside the group"):
        runtime.eager(program)
    monkeypatch.undo()
    for rank, arena in enumerate(runtime.arenas):
        assert (arena.copy_out("early") == rank).all()
    assert works(runtime, small)


def test_a_rank_that_never_comes_is_reported_with_what_the_devices_passed(small, gpu_settings):
    release = threading.Event()
    with trlow.Runtime(gpu_settings(2, deadline_s=2.0), small.plan) as runtime:
        replay = runtime.capture(small.feed_program())

        def fill(rank, step, slot):
            if rank == 1 and step == 3:
                release.wait(6.0)

        begun = time.monotonic()
        with pytest.raises(RankError) as caught:
            replay.run(10, fill)
        assert time.monotonic() - begun < 12
        assert "before COMM" in caught.value.report or runtime.platform.name == "host"
        release.set()
        assert works(runtime, small)


def test_ctrl_c_in_the_loop(runtime, small):
    replay = runtime.capture(small.feed_program())
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        replay.run(1_000_000_000, nothing)
    timer.join()
    assert works(runtime, small)


def captured_or_spoiled(runtime, small):
    """-1 if a capture went well and its replay is right, else the rank that the error names."""
    try:
        assert works(runtime, small)
    except CaptureError as error:
        return error.rank
    return -1


def test_another_thread_at_work_on_a_gpu_spoils_a_capture_by_name_or_not_at_all(runtime, small):
    """It copies and synchronises on rank 1's GPU, which for rank 0 is the other one."""
    stop, errors, rounds = threading.Event(), [], []
    platform, device = runtime.platform, runtime.devices[1]

    def disturb():
        try:
            with platform.on(device):
                stream, pointer = c_void_p(), c_void_p()
                platform.cudart.cudaStreamCreateWithFlags(byref(stream), 1)
                platform.cudart.cudaMalloc(byref(pointer), 1 << 20)
                while not stop.is_set():
                    platform.cudart.cudaMemsetAsync(pointer, 0, 1 << 20, stream)
                    platform.cudart.cudaStreamSynchronize(stream)
                    rounds.append(1)
                platform.cudart.cudaFree(pointer)
                platform.cudart.cudaStreamDestroy(stream)
        except TrlowError as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        spoiled = [rank for _ in range(5) if (rank := captured_or_spoiled(runtime, small)) != -1]
    finally:
        stop.set()
        thread.join(20)
    assert rounds or errors
    assert set(spoiled) <= {0, 1}
    assert works(runtime, small)


def test_everything_on_rank_1_works_from_a_fresh_thread(runtime, small):
    seen = []

    def work():
        before, after = c_int(), c_int()
        runtime.platform.cudart.cudaGetDevice(byref(before))
        runtime.arenas[1].copy_in("late", np.full(24, 3, np.float32))
        seen.append(runtime.arenas[1].copy_out("late"))
        seen.append(works(runtime, small))
        runtime.platform.cudart.cudaGetDevice(byref(after))
        seen.append((before.value, after.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert (seen[0] == 3).all()
    assert seen[1]
    assert seen[2] == (0, 0)


PROCESS = """
import sys, threading, time
sys.path.insert(0, {root!r})
import numpy as np, trlow
from trlow import range_op
table = trlow.RegionTable("t", (
    trlow.Region("G", trlow.F32, "gradients"), trlow.Region("S", trlow.F32, "scalars")), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (100,)); builder.add("S", "f", (1,))
plan = builder.build()
program = trlow.Program.single("p", (trlow.Stage("COMM", trlow.Stream.UPDATE, (
    range_op.mean_all_reduce(plan.range("g"), factor=plan.range("f")),)),))
runtime = trlow.Runtime(trlow.Settings(device={device!r}, gpus="0-1", deadline_s=20.0), plan)
replay = runtime.capture(program)
replay.run(5)
{ending}
"""
ENDINGS = {
    "everything alive": ("", 0),
    "closed twice": ("runtime.close(); runtime.close()", 0),
    "an exit code": ("raise SystemExit(3)", 3),
    "while a replay runs": (
        "threading.Thread(target=replay.run, args=(10**9,), daemon=True).start(); time.sleep(0.5)",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_process_ends_in_time_with_the_right_code_and_a_clean_stderr(device, name):
    ending, code = ENDINGS[name]
    text = PROCESS.format(root=ROOT, device=device, ending=ending)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert time.monotonic() - begun < 40
