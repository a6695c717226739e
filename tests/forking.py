"""A process that forks after or before it has used devices; tests start it and read its output.

python tests/forking.py cuda|host after|before
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.errors import UsageError

table = trlow.RegionTable("t", (trlow.Region("G", trlow.F32, "gradients"),), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (100,))
plan = builder.build()
everything = plan.range("g")
stage = trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(everything),))
program = trlow.Program.single("sum", (stage,))
settings = trlow.Settings(device=sys.argv[1], gpus="0", deadline_s=20.0)


def train(runtime):
    replay = runtime.capture(program)
    runtime.arenas[0].copy_in("g", np.full(100, 2, np.float32))
    replay.run(3)
    assert (runtime.arenas[0].copy_out("g") == 2).all()  # the sum over one rank
    return replay


def in_a_child(function):
    """How many seconds it took."""
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return time.monotonic() - begun


def use_what_is_the_parents(runtime, replay, parent):
    attempts = {
        "capture": lambda: runtime.capture(program),
        "replay": lambda: replay.run(1),
        "copy": lambda: runtime.arenas[0].copy_out("g"),
        "count": runtime.platform.device_count,
        "anew": lambda: trlow.Runtime(settings, plan),
    }
    for name, attempt in attempts.items():
        with pytest.raises(UsageError, match=f"{os.getpid()} was forked from process {parent} "):
            attempt()
        print(name, "refused")
    runtime.close()  # is the parent's: nothing happens, and nothing hangs


def after():
    with trlow.Runtime(settings, plan) as runtime:
        replay, parent = train(runtime), os.getpid()
        seconds = in_a_child(lambda: use_what_is_the_parents(runtime, replay, parent))
        assert seconds < 5
        train(runtime)
        print("the parent goes on")


def before():
    def alone():
        with trlow.Runtime(settings, plan) as runtime:
            train(runtime)
        print("the child works", flush=True)

    in_a_child(alone)
    with trlow.Runtime(settings, plan) as runtime:
        train(runtime)
    print("the parent works")


if __name__ == "__main__":
    {"after": after, "before": before}[sys.argv[2]]()
