"""Leaving in any way ends within seconds, with the right exit code and a clean stderr."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import trlow
from trlow.device import Platform

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import sys, threading, time
sys.path.insert(0, {folder!r})
import numpy as np
import trlow
from trlow.device import Platform
from trlow import range_op

table = trlow.RegionTable("t", (
    trlow.Region("G", trlow.F32, "gradients"), trlow.Region("S", trlow.F32, "scalars")), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (100,))
builder.add("S", "f", (1,))
plan = builder.build()
program = trlow.Program.single("p", (trlow.Stage("COMM", trlow.Stream.UPDATE, (
    range_op.mean_all_reduce(plan.range("g"), factor=plan.range("f")),)),))
settings = trlow.Settings(device="host", gpus="0-3", host_devices=4, deadline_s=20.0)
runtime = trlow.Runtime(settings, plan)
replay = runtime.capture(program)
replay.run(5)
{ending}
"""
ENDINGS = {
    "with everything alive": ("", 0),
    "after close": ("runtime.close(); runtime.close()", 0),
    "by an exception": ("raise SystemExit(3)", 3),
    "while a replay runs": (
        "threading.Thread(target=replay.run, args=(10**9,), daemon=True).start(); time.sleep(0.3)",
        0,
    ),
    "by sys.exit in a context": ("with runtime:\n    sys.exit(5)", 5),
}


def run(ending, flags=("-W", "error")):
    code = PROGRAM.format(folder=str(trlow.__path__[0] + "/.."), ending=ending)
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("name", ENDINGS)
def test_ending(name):
    ending, code = ENDINGS[name]
    begun = time.monotonic()
    done = run(ending)
    assert (done.returncode, done.stderr) == (code, "")
    assert time.monotonic() - begun < 10


def test_ctrl_c_while_a_replay_runs_ends_the_process():
    code = PROGRAM.format(
        folder=str(trlow.__path__[0] + "/.."), ending="print('up', flush=True); replay.run(10**9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode != 0
    assert stderr.strip().endswith("KeyboardInterrupt")


def test_a_forgotten_runtime_is_a_resource_warning():
    done = run("del runtime, replay; import gc; gc.collect()", flags=("-W", "always"))
    assert done.returncode == 0
    assert "ResourceWarning: a trlow Runtime was not closed" in done.stderr


def test_close_gives_every_handle_back(settings, small):
    names = (b"streams", b"events", b"graphs", b"execs", b"allocations", b"pinned", b"comms")
    live = Platform.open(settings).host.trlowHostLive
    before = [live(name) for name in names]
    with trlow.Runtime(settings, small.plan) as runtime:
        runtime.capture(small.mean_program(), "fused").run(2)
        runtime.capture(small.feed_program(), "staged").run(2, lambda rank, step, slot: None)
        assert live(b"execs") > 0
    assert [live(name) for name in names] == before


# What fails to be released lives on: so these run in processes of their own.
BODY_ERROR = """
try:
    with runtime:
        runtime.platform.host.trlowHostFail(b"cudaStreamDestroy", 1, 400)
        raise KeyError("body")
except KeyError as error:
    assert error.args == ("body",)
"""
FAILING_RELEASE = """
live = lambda: runtime.platform.host.trlowHostLive({what!r}.encode())
runtime.platform.host.trlowHostFail({function!r}.encode(), 1, 3)
try:
    runtime.close()
except trlow.TrlowError as error:
    assert {function!r} in str(error), error
else:
    raise SystemExit("no error")
assert live() == 1, live()  # the one that failed; all others were released all the same
runtime.close()
"""


def test_the_body_error_wins_over_one_from_closing():
    done = run(BODY_ERROR)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("cudaStreamDestroy", "streams"),
        ("cudaEventDestroy", "events"),
        ("cudaFree", "allocations"),
        ("cudaFreeHost", "pinned"),
        ("cudaGraphExecDestroy", "execs"),
        ("ncclCommDestroy", "comms"),
    ],
)
def test_a_failing_release_is_one_error_and_no_hang(function, what):
    done = run(FAILING_RELEASE.format(function=function, what=what))
    assert (done.returncode, done.stderr) == (0, "")


def test_one_rank_never_loads_nccl(small):
    settings = trlow.Settings(device="host", gpus="0", host_devices=4)
    with trlow.Runtime(settings, small.plan) as runtime:
        before = runtime.platform.host.trlowHostCalls(b"ncclCommInitAll")
        replay = runtime.capture(small.feed_program())
        replay.run(3, lambda rank, step, slot: None)
        assert "nccl" not in runtime.platform.libraries
        assert runtime.platform.host.trlowHostCalls(b"ncclCommInitAll") == before
