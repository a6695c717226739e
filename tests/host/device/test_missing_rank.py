"""A rank that does not come: who is told what, and how the others go on."""

from __future__ import annotations

import threading
import time
from ctypes import byref, c_int

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(60)

TIMEOUT, REMOTE_ERROR = 702, 6


@pytest.fixture
def team(machine):
    comms = machine.comms(4)
    streams = [machine.stream(rank) for rank in range(4)]
    arrays = [machine.array([1.0], np.float32, rank) for rank in range(4)]
    return comms, streams, arrays


def issue(machine, team, *ranks):
    comms, streams, arrays = team
    for rank in ranks:
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)


def abort_all(machine, team):
    for comm in team[0]:
        machine.nccl.ncclCommAbort(comm)
        machine.forget(comm)


def async_error(machine, comm):
    value = c_int()
    machine.nccl.ncclCommGetAsyncError(comm, byref(value))
    return value.value


def test_after_the_timeout_every_waiting_call_returns_and_the_report_names_the_rank(machine, team):
    machine.host.trlowHostProgressTimeout(200)
    comms, streams, _ = team
    issue(machine, team, 0, 1, 3)
    assert async_error(machine, comms[0]) == 0
    start = time.monotonic()
    assert machine.code(machine.cudart.cudaStreamSynchronize, streams[0]) == TIMEOUT
    assert 0.15 < time.monotonic() - start < 5
    report = machine.report()
    assert "no progress for 0.2 s" in report
    assert "arrived: ranks 0, 1, 3; missing: rank 2 (device 2), which has not issued it" in report
    assert async_error(machine, comms[1]) == REMOTE_ERROR
    abort_all(machine, team)
    machine.sync(*streams)


def test_a_late_rank_still_completes_it(machine, team):
    machine.host.trlowHostProgressTimeout(50)
    comms, streams, arrays = team
    issue(machine, team, 0, 1, 3)
    assert machine.code(machine.cudart.cudaStreamSynchronize, streams[0]) == TIMEOUT
    issue(machine, team, 2)
    machine.sync(*streams)
    assert all(view[0] == 4 for _, view in arrays)
    assert async_error(machine, comms[0]) == 0


def test_it_is_certain_at_once_when_every_declared_issuer_waits(machine, team):
    _, streams, _ = team
    issue(machine, team, 0, 1, 3)
    codes, ready = {}, threading.Barrier(3, timeout=20)

    def wait(rank):
        machine.host.trlowHostIssuerEnter()
        ready.wait()
        codes[rank] = machine.code(machine.cudart.cudaStreamSynchronize, streams[rank])
        machine.host.trlowHostIssuerLeave()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1, 3)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert codes == dict.fromkeys((0, 1, 3), TIMEOUT)
    assert time.monotonic() - start < 3  # the progress timeout is 5 s
    assert "every thread that issues work waits" in machine.report()
    abort_all(machine, team)
    machine.sync(*streams)


def test_an_issuer_that_still_may_issue_keeps_the_others_waiting(machine, team):
    _, streams, arrays = team
    codes, ready, late = {}, threading.Barrier(2, timeout=20), threading.Event()

    def wait():
        machine.host.trlowHostIssuerEnter()
        issue(machine, team, 0, 1, 3)
        ready.wait()
        codes[0] = machine.code(machine.cudart.cudaStreamSynchronize, streams[0])
        machine.host.trlowHostIssuerLeave()

    def come_late():
        machine.host.trlowHostIssuerEnter()
        ready.wait()
        late.wait(20)
        issue(machine, team, 2)
        machine.host.trlowHostIssuerLeave()

    threads = [threading.Thread(target=target) for target in (wait, come_late)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not codes
    late.set()
    for thread in threads:
        thread.join(20)
    assert codes == {0: 0}
    machine.sync(*streams)
    assert arrays[0][1][0] == 4


def test_an_issuer_thread_that_ends_is_no_issuer_any_more(machine, team):
    _, streams, _ = team
    thread = threading.Thread(target=machine.host.trlowHostIssuerEnter)
    thread.start()
    thread.join(20)
    machine.host.trlowHostIssuerEnter()
    issue(machine, team, 0)
    start = time.monotonic()
    assert machine.code(machine.cudart.cudaStreamSynchronize, streams[0]) == TIMEOUT
    assert time.monotonic() - start < 3
    machine.host.trlowHostIssuerLeave()
    abort_all(machine, team)
    machine.sync(*streams)


def test_it_is_certain_at_once_when_the_missing_ranks_communicator_is_gone(machine, team):
    comms, streams, _ = team
    issue(machine, team, 0)
    machine.nccl.ncclCommAbort(comms[2])
    machine.forget(comms[2])
    other = machine.event()
    machine.cudart.cudaEventRecord(other, streams[0])
    machine.cudart.cudaStreamWaitEvent(machine_stream := machine.stream(), other, 0)
    start = time.monotonic()
    # found through the event, too
    assert machine.code(machine.cudart.cudaStreamSynchronize, machine_stream) == TIMEOUT
    assert time.monotonic() - start < 3
    assert "rank 2 (device 2), whose communicator is gone" in machine.report()
    for rank in (0, 1, 3):
        machine.nccl.ncclCommAbort(comms[rank])
        machine.forget(comms[rank])
    machine.sync(*streams)


def test_abort_lets_the_streams_go_on_without_effect_and_a_new_communicator_works(machine, team):
    comms, streams, arrays = team
    issue(machine, team, 0, 1, 3)
    machine.cudart.cudaMemsetAsync(arrays[0][0], 0, 4, streams[0])
    machine.nccl.ncclCommAbort(comms[0])
    machine.forget(comms[0])
    machine.sync(streams[0])  # rank 0 goes on while the others still wait
    assert arrays[0][1][0] == 0
    assert machine.cudart.cudaStreamQuery(streams[1]) == 600
    for rank in (1, 2, 3):
        machine.nccl.ncclCommAbort(comms[rank])
        machine.forget(comms[rank])
    machine.sync(*streams)
    assert [view[0] for _, view in arrays] == [0, 1, 1, 1]
    assert machine.code(machine.all_reduce, 0, arrays[0][0], 1, comms, streams) == 4
    new = machine.comms(4)
    for rank in range(4):
        arrays[rank][1][0] = rank
        machine.all_reduce(rank, arrays[rank][0], 1, new, streams)
    machine.sync(*streams)
    assert all(view[0] == 6 for _, view in arrays)


def captured(machine, team):
    comms, streams, arrays = team
    for stream in streams:
        machine.cudart.cudaStreamBeginCapture(stream, 1)
    for rank in range(4):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
    graphs = [machine.end_capture(stream) for stream in streams]
    return graphs, [machine.instantiate(graph) for graph in graphs]


def destroy(machine, graphs, execs):
    for exec_ in execs:
        machine.cudart.cudaGraphExecDestroy(exec_)
    for graph in graphs:
        machine.cudart.cudaGraphDestroy(graph)
    for handle in (*graphs, *execs):
        machine.forget(handle)


def test_a_missing_launch_is_recovered_by_abort_once_the_graphs_are_destroyed(machine, team):
    machine.host.trlowHostProgressTimeout(500)
    comms, streams, _ = team
    graphs, execs = captured(machine, team)
    machine.replay(execs[0], streams[0], 0)
    codes = {}
    helpers = [
        threading.Thread(
            target=lambda r=rank: codes.update(
                {r: machine.code(machine.nccl.ncclCommAbort, comms[r])}
            )
        )
        for rank in range(4)
    ]
    for helper in helpers:
        helper.start()
    machine.sync(streams[0])  # the abort ends rank 0's graph although the graphs are alive
    time.sleep(0.05)
    assert not codes
    destroy(machine, graphs, execs)
    for helper in helpers:
        helper.join(20)
    assert codes == dict.fromkeys(range(4), 0)
    for comm in comms:
        machine.forget(comm)
    new = machine.comms(4)
    issue(machine, (new, *team[1:]), *range(4))
    machine.sync(*streams)


def test_abort_with_graphs_that_nobody_destroys_ends_with_an_error(machine, team):
    comms, _, _ = team
    graphs, execs = captured(machine, team)
    machine.host.trlowHostProgressTimeout(10)  # abort waits ten times that, at most 30 s
    assert machine.code(machine.nccl.ncclCommAbort, comms[0]) == 3
    assert "graphs that captured it are still alive" in machine.report()
    machine.forget(comms[0])
    destroy(machine, graphs, execs)


def test_destroying_a_communicator_with_live_graphs_is_refused(machine, team):
    comms, _, _ = team
    graphs, execs = captured(machine, team)
    assert machine.code(machine.nccl.ncclCommDestroy, comms[0]) == 5
    assert "destroy them first" in machine.report()
    for exec_ in execs:
        machine.cudart.cudaGraphExecDestroy(exec_)
        machine.forget(exec_)
    assert machine.code(machine.nccl.ncclCommDestroy, comms[0]) == 5
    destroy(machine, graphs, [])


def test_destroying_a_communicator_with_a_stuck_collective_is_an_error_not_a_hang(machine, team):
    comms, streams, _ = team
    issue(machine, team, 0)
    machine.host.trlowHostProgressTimeout(100)
    assert machine.code(machine.nccl.ncclCommDestroy, comms[0]) == REMOTE_ERROR
    abort_all(machine, team)
    machine.sync(*streams)


def test_freeing_memory_of_a_stuck_device_is_an_error_not_a_hang(machine, team):
    _, streams, arrays = team
    issue(machine, team, 0)
    machine.host.trlowHostProgressTimeout(100)
    assert machine.code(machine.cudart.cudaFree, arrays[0][0]) == TIMEOUT
    abort_all(machine, team)
    machine.sync(*streams)


def test_making_a_communicator_that_a_rank_does_not_ask_for_is_an_error_not_a_hang(machine):
    from ctypes import c_void_p

    from trlow.binding import nccl as nccl_binding

    machine.host.trlowHostProgressTimeout(100)
    unique, handle = nccl_binding.UniqueId(), c_void_p()
    machine.nccl.ncclGetUniqueId(byref(unique))
    code = machine.code(machine.nccl.ncclCommInitRank, byref(handle), 2, unique, 0)
    assert code == REMOTE_ERROR
    assert "missing ranks 1" in machine.report()
    assert handle.value is None
