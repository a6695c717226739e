"""Somebody else begins and ends the captures, and holds a copy of what was recorded."""

from __future__ import annotations

import time
from ctypes import byref, c_void_p

import numpy as np
import pytest

import trlow
from trlow.errors import CaptureError, RankError
from trlow.recording import PlainRecorder, Recorded

pytestmark = pytest.mark.timeout(60)


class Recorder:
    """Counts what it is told, and fails where it is asked to."""

    def __init__(self, rank, broken=()):
        self.cudart = rank.platform.cudart
        self.plain = PlainRecorder(rank.platform)
        self.broken = broken
        self.begun = self.ended = self.forgotten = self.released = 0

    def fail(self, where):
        if where in self.broken:
            raise ValueError(f"planted: {where}")

    def begin(self, stream):
        self.begun += 1
        self.fail("begin")
        self.plain.begin(stream)

    def end(self, stream):
        self.fail("end")
        graph, _ = self.plain.end(stream)
        self.ended += 1
        copy = c_void_p()
        self.cudart.cudaGraphClone(byref(copy), graph)

        def release():
            self.released += 1
            self.cudart.cudaGraphDestroy(copy.value)
            self.fail("release")

        return Recorded(graph, release)

    def forget(self, stream):
        self.forgotten += 1
        self.fail("forget")


@pytest.fixture
def recorders(runtime):
    """``recorders(broken)`` puts one on every rank; rank 1's is the broken one."""

    def put(*broken):
        def on(rank):
            rank.recorder = Recorder(rank, broken if rank.index == 1 else ())
            return rank.recorder

        return runtime.together(on)

    return put


def mean_of(runtime, small):
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
        arena.copy_in("factor", np.array([0.25], np.float32))
    return runtime.capture(small.mean_program())


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_every_section_is_theirs_and_goes_with_its_graph(runtime, small, recorders, mode):
    made = recorders()
    program = small.mean_program()
    replay = runtime.capture(program, mode)
    sections = 1 if mode == "fused" else len({stage.name for stage in program.phases[0]})
    assert [(each.begun, each.ended) for each in made] == [(sections, sections)] * len(made)
    replay.run(2)
    runtime.release(replay)
    assert {each.released for each in made} == {sections if mode == "fused" else 0}
    runtime.close()
    assert {(each.released, each.forgotten) for each in made} == {(sections, 0)}


def test_copies_that_hold_collectives_go_ahead_of_an_abort(runtime, small, recorders):
    made = recorders()
    replay = mean_of(runtime, small)
    slow = runtime.capture(small.feed_program())

    def fill(rank, step, _):
        if rank == 1 and step == 2:
            raise OSError("no more data")

    begun = time.monotonic()
    with pytest.raises(RankError, match="no more data"):
        slow.run(10, fill)
    assert time.monotonic() - begun < 8  # an abort waits 10 s for graphs that hold collectives
    assert not runtime.dead
    assert replay.closed
    assert all(each.released == each.ended > 0 for each in made)
    mean_of(runtime, small).run(1)


def test_a_release_that_fails_is_raised_and_spares_nothing(runtime, small, recorders):
    live = runtime.platform.host.trlowHostLive
    before = live(b"graphs"), live(b"execs")
    made = recorders("release")
    replay = runtime.capture(small.feed_program())
    with pytest.raises(RankError, match="planted: release"):
        runtime.release(replay)
    assert all(each.released == each.ended > 1 for each in made)
    assert (live(b"graphs"), live(b"execs")) == before


@pytest.mark.parametrize("broken", [("begin",), ("end",), ("begin", "forget"), ("end", "forget")])
def test_one_that_fails_is_forgotten_and_what_failed_first_is_raised(
    runtime, small, recorders, broken
):
    made = recorders(*broken)
    with pytest.raises(CaptureError, match=f"planted: {broken[0]}") as caught:
        mean_of(runtime, small)
    assert made[1].forgotten == 1
    if "forget" in broken:
        notes = getattr(caught.value.__cause__, "__notes__", ())
        assert "while forgetting the capture: planted: forget" in notes
    assert all(each.ended == each.released for each in made)
    assert runtime.platform.host.trlowHostLive(b"captures") == 0
    recorders()
    mean_of(runtime, small).run(1)


def test_work_that_fails_in_a_capture_is_forgotten(runtime, small, recorders):
    seen = []

    def callback(rank, stream):
        seen.append(rank)
        if seen.count(rank) == 2 and rank == 1:  # the first time is the warm-up
            raise ValueError("planted")

    external = trlow.External("callback", (), (small.plan.range("feature"),), callback)
    stage = trlow.Stage("WORK", trlow.Stream.COMP_1, external=external)
    made = recorders()
    with pytest.raises(CaptureError, match="planted"):
        runtime.capture(trlow.Program.single("work", (stage, *small.mean_program().phases[0])))
    assert made[1].forgotten == 1
    assert sum(each.forgotten + each.ended for each in made) == len(made)
    assert runtime.platform.host.trlowHostLive(b"captures") == 0
