"""Beats in graphs: seen by the waiting thread, ignored by what follows, told when all stands."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.binding.cudart import cudaHostFn_t
from trlow.errors import RankError

pytestmark = pytest.mark.timeout(60)


def members(runtime):
    return runtime._team.members


def test_every_step_beats_before_and_after_each_collective_and_at_its_end(runtime, small):
    replay = runtime.capture(small.mean_program())
    before = [member.watch.value for member in members(runtime)]
    replay.run(7)
    for member, old in zip(members(runtime), before, strict=True):
        # before the first, between the two, and behind the second: that is the end, too
        assert member.watch.value - old == 7 * 3
        assert member.watch.last == "after FIRST_COMM, end of mean (time 7)"


def test_a_runtime_without_watch_has_no_beats(small):
    settings = trlow.Settings(device="host", gpus="0-1", host_devices=4, watch=False)
    with trlow.Runtime(settings, small.plan) as runtime:
        unwatched = runtime.capture(small.mean_program())._prepared[0].graphs.nodes[0]
    with trlow.Runtime(settings, small.plan) as runtime:
        assert members(runtime)[0].watch is None
    watched_settings = trlow.Settings(device="host", gpus="0-1", host_devices=4)
    with trlow.Runtime(watched_settings, small.plan) as runtime:
        watched = runtime.capture(small.mean_program())._prepared[0].graphs.nodes[0]
    assert len(watched) - len(unwatched) == 3


def test_a_rank_whose_device_hangs_is_named_with_what_every_rank_passed(small):
    settings = trlow.Settings(device="host", gpus="0-3", host_devices=4, deadline_s=1.0)
    release, armed = threading.Event(), threading.Event()

    def body(rank):
        def run(_):
            if rank == 2 and armed.is_set():
                release.wait(8.0)

        return cudaHostFn_t(run)

    functions = [body(rank) for rank in range(4)]

    with trlow.Runtime(settings, small.plan) as runtime:
        cudart = runtime.platform.cudart

        def callback(rank, stream):
            cudart.cudaLaunchHostFunc(stream, functions[rank], None)

        feature = small.plan.range("feature")
        program = trlow.Program.single(
            "stuck",
            (
                trlow.Stage(
                    "WORK",
                    trlow.Stream.COMP_1,
                    external=trlow.External("callback", (), (feature,), callback),
                ),
                trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(feature),)),
            ),
        )
        replay = runtime.capture(program)
        replay.run(3)
        armed.set()
        threading.Timer(3.0, release.set).start()
        with pytest.raises(RankError, match="no progress for 1 s") as caught:
            replay.run(5)
        report = caught.value.report.splitlines()
        header = ["rank", "device", "the host is at", "the device passed", "NCCL"]
        assert report[0].split() == " ".join(header).split()
        assert [line.split()[0] for line in report[1:5]] == ["0", "1", "2", "3"]
        assert all("before COMM (time 1)" in report[1 + rank] for rank in (0, 1, 3))
        assert "nothing yet" in report[3]
        assert any("coordinator:" in line for line in report)
        armed.clear()
        fresh = runtime.capture(small.mean_program())
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("early", np.full(1000, rank, np.float32))
            arena.copy_in("factor", np.array([0.25], np.float32))
        fresh.run(1)
        assert all((arena.copy_out("early") == 1.5).all() for arena in runtime.arenas)


def test_an_eager_step_sees_the_data_that_was_there_before_its_first_use(runtime, small):
    program = trlow.Program.single(
        "sum",
        (trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(small.early),)),),
    )
    runtime.eager(program)
    assert all((arena.copy_out("early") == 6).all() for arena in runtime.arenas)
