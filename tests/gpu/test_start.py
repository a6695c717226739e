"""Fresh processes in which rank 1 does everything for the first time as late as it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trlow

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(110)]
ROOT = str(Path(trlow.__file__).parents[1])
RUNS = int(os.environ.get("TRLOW_TEST_STARTS", "10"))
PROGRAM = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(60, exit=True)
sys.path.insert(0, {root!r})
import numpy as np, trlow
from ctypes import byref, c_void_p
from trlow import range_op
table = trlow.RegionTable("t", (
    trlow.Region("G", trlow.F32, "gradients"), trlow.Region("S", trlow.F32, "scalars")), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (100_000,)); builder.add("S", "f", (1,))
plan = builder.build()
late = []
def callback(rank, stream):
    # The first copy and allocation of rank 1 outside of its arena, just before its work.
    if rank == 1 and not late:
        late.append(1)
        time.sleep(0.3)
        pointer = c_void_p()
        runtime.platform.cudart.cudaMalloc(byref(pointer), 1 << 20)
        runtime.platform.cudart.cudaMemsetAsync(pointer, 0, 1 << 20, stream)
g = plan.range("g")
program = trlow.Program.single("p", (
    trlow.Stage("WORK", trlow.Stream.COMP_1,
                external=trlow.External("callback", (), (g,), callback)),
    trlow.Stage("COMM", trlow.Stream.UPDATE, (
        range_op.mean_all_reduce(g, factor=plan.range("f")), range_op.scale(g, plan.range("f")),)),
    trlow.Stage("CLEAR", trlow.Stream.COMP_2, (range_op.clear(plan.range("f")),)),
))
with trlow.Runtime(trlow.Settings(device={device!r}, gpus="0-1", deadline_s=20.0), plan) as runtime:
    replay = runtime.capture(program, {mode!r})
    runtime.arenas[1].copy_in("f", np.array([1.0], np.float32))
    replay.run(50)
print("ended")
"""


@pytest.mark.parametrize("number", range(RUNS))
def test_a_late_rank_1_hangs_no_start(device, number):
    mode = ("fused", "staged")[number % 2]
    text = PROGRAM.format(root=ROOT, device=device, mode=mode)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == "ended\n"
