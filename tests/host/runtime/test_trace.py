"""When stages ran, from the device's clock, on copies of everything persistent."""

from __future__ import annotations

import json

import numpy as np
import pytest

import trlow
from trlow import range_op
from trlow.errors import UsageError
from trlow.trace import exposed_comm_us, stamped, trace, without_communication

pytestmark = pytest.mark.timeout(60)


def fill(rank, step, slot):
    slot["data"][:] = rank


def test_every_stage_of_every_step_and_rank_has_a_start_before_its_end(runtime, small):
    program = small.feed_program()
    found = trace(runtime, program, 5, fill)
    assert len(found.spans) == 4 * 5 * 4  # ranks, steps, stages of a phase
    assert all(0 <= span.start_us < span.end_us for span in found.spans)
    names = {(span.step, span.stage) for span in found.spans if span.stage.startswith("XFER")}
    assert names == {(step, "XFER_B" if step % 2 == 0 else "XFER_A") for step in range(5)}


def test_spans_respect_the_edges_of_the_program(runtime, small):
    for span in (spans := trace(runtime, small.feed_program(), 4, fill).spans):
        later = {"FORWARD": "COMM", "COMM": "COLLECT"}.get(span.stage)
        for other in spans:
            if (other.rank, other.step, other.stage) == (span.rank, span.step, later):
                assert span.end_us <= other.start_us


def test_a_trace_leaves_persistent_memory_and_handles_as_they_were(runtime, small):
    live = runtime.platform.host.trlowHostLive
    weights = np.arange(6, dtype=np.float32)
    for arena in runtime.arenas:
        arena.copy_in("w", weights)
    runtime.capture(small.feed_program()).run(1, fill)  # slots and events exist from here on
    after_one = [arena.copy_out("w") for arena in runtime.arenas]
    names = (b"graphs", b"execs", b"allocations")
    before = [live(name) for name in names]
    trace(runtime, small.feed_program(), 3, fill)
    exposed_comm_us(runtime, small.feed_program(), 5, fill, rounds=1)
    assert [live(name) for name in names] == before
    for arena, kept in zip(runtime.arenas, after_one, strict=True):
        assert (arena.copy_out("w") == kept).all()


def test_chrome_events_name_ranks_and_streams(runtime, small):
    events = json.loads(trace(runtime, small.feed_program(), 2, fill).to_chrome())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"TRANS", "COMP_1", "COMP_2", "UPDATE"}
    assert all(event["dur"] > 0 for event in complete)


def test_overlap_is_measured_between_two_stages_of_one_rank(runtime, small):
    found = trace(runtime, small.feed_program(), 2, fill)
    assert found.overlap_us("COMM", "COLLECT") == 0
    with pytest.raises(UsageError, match="NOTHING"):
        found.overlap_us("COMM", "NOTHING")


def test_a_program_without_communication_keeps_the_rest(small):
    silent = without_communication(small.mean_program())
    assert silent.collectives(0) == ()
    kernels = [action.kernel for stage in silent.phases[0] for action in stage.actions]
    assert kernels == ["scale_f32", "scale_f32"]


def test_a_rank_that_fails_while_traced_leaves_no_tracer(runtime, small):
    def failing(rank, step, slot):
        if step == 2:
            raise OSError

    with pytest.raises(trlow.TrlowError):
        stamped(runtime, small.feed_program(), 5, failing)
    assert all(member.tracer is None for member in runtime._team.members)
    program = trlow.Program.single(
        "after", (trlow.Stage("S", trlow.Stream.UPDATE, (range_op.clear(small.early),)),)
    )
    runtime.capture(program).run(1)
    assert not runtime.arenas[0].copy_out("early").any()
