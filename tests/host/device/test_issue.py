"""Issuing collectives: groups, what is refused, and mismatches between ranks."""

from __future__ import annotations

import threading
from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

from trlow.communicator import indivisible

pytestmark = pytest.mark.timeout(60)

INVALID_ARGUMENT, INVALID_USAGE = 4, 5


@pytest.fixture
def team(machine):
    """(communicators, streams, arrays) of two ranks; every array holds ones."""
    comms = machine.comms(2)
    streams = [machine.stream(rank) for rank in range(2)]
    arrays = [machine.array(np.ones(8), np.float32, rank) for rank in range(2)]
    return comms, streams, arrays


def finish(machine, team):
    """A collective that works, so that nothing of the test is left half done."""
    comms, streams, arrays = team
    for rank in range(2):
        arrays[rank][1][:] = 1
        machine.all_reduce(rank, arrays[rank][0], 8, comms, streams)
    machine.sync(*streams)
    assert all((view == 2).all() for _, view in arrays)


def test_nothing_of_a_group_happens_before_its_end(machine, team):
    comms, streams, arrays = team
    machine.nccl.ncclGroupStart()
    machine.nccl.ncclGroupStart()
    for rank in range(2):
        machine.all_reduce(rank, arrays[rank][0], 8, comms, streams)
    machine.nccl.ncclGroupEnd()
    machine.sync(*streams)
    assert all((view == 1).all() for _, view in arrays)
    machine.nccl.ncclGroupEnd()
    machine.sync(*streams)
    assert all((view == 2).all() for _, view in arrays)


def test_a_null_communicator_poisons_the_group_and_nothing_is_launched(machine, team):
    comms, streams, arrays = team
    machine.nccl.ncclGroupStart()
    machine.all_reduce(0, arrays[0][0], 8, comms, streams)
    assert machine.code(machine.all_reduce, 0, arrays[0][0], 8, [None], streams) == 4
    machine.all_reduce(1, arrays[1][0], 8, comms, streams)
    assert machine.code(machine.nccl.ncclGroupEnd) == INVALID_ARGUMENT
    machine.sync(*streams)
    assert all((view == 1).all() for _, view in arrays)
    finish(machine, team)


@pytest.mark.parametrize("issued", [0, 1, 2])
def test_nothing_of_a_group_whose_body_raises_happens(machine, team, issued):
    comms, streams, arrays = team
    with pytest.raises(KeyError, match="planted"), indivisible(machine.nccl):
        for rank in range(issued):
            machine.all_reduce(rank, arrays[rank][0], 8, comms, streams)
        raise KeyError("planted")
    machine.sync(*streams)
    assert all((view == 1).all() for _, view in arrays)
    assert machine.code(machine.nccl.ncclGroupEnd) == INVALID_USAGE  # none is open
    finish(machine, team)


def test_an_end_without_a_start_is_refused(machine):
    assert machine.code(machine.nccl.ncclGroupEnd) == INVALID_USAGE


def test_one_thread_issues_for_all_ranks_without_a_group(machine, team):
    finish(machine, team)


def refusals(machine, comms, streams, arrays):
    """name -> (arguments of ncclAllReduce, a part of the report)."""
    address = arrays[0][0]
    ordinary = np.ones(8, np.float32)
    return {
        "too long": ((address, address, 9, 7, 0, comms[0], streams[0]), "9 elements"),
        "not device memory": (
            (ordinary.ctypes.data, address, 8, 7, 0, comms[0], streams[0]),
            "sendbuff",
        ),
        "another device's": (
            (address, arrays[1][0], 8, 7, 0, comms[0], streams[0]),
            "recvbuff",
        ),
        "type": ((address, address, 8, 99, 0, comms[0], streams[0]), "data type 99"),
        "operation": ((address, address, 8, 7, 17, comms[0], streams[0]), "reduction 17"),
        "stream": ((address, address, 8, 7, 0, comms[0], streams[1]), "device 1"),
        "count": ((address, address, 2**63, 7, 0, comms[0], streams[0]), "sendbuff"),
    }


def test_arguments_that_cannot_be_are_refused_with_a_report(machine, team):
    for arguments, text in refusals(machine, *team).values():
        assert machine.code(machine.nccl.ncclAllReduce, *arguments) == INVALID_ARGUMENT
        assert text in machine.report()
    comms, streams, arrays = team
    bad_root = (arrays[0][0], arrays[0][0], 8, 7, 2, comms[0], streams[0])
    assert machine.code(machine.nccl.ncclBroadcast, *bad_root) == INVALID_ARGUMENT
    assert "0 to 1" in machine.report()
    finish(machine, team)


MISMATCHES = {
    "count": (lambda m, a, c, s: m.nccl.ncclAllReduce(a, a, 7, 7, 0, c, s), "7 float32"),
    "type": (lambda m, a, c, s: m.nccl.ncclAllReduce(a, a, 8, 2, 0, c, s), "8 int32"),
    "reduction": (lambda m, a, c, s: m.nccl.ncclAllReduce(a, a, 8, 7, 2, c, s), "max"),
    "operation": (lambda m, a, c, s: m.nccl.ncclBroadcast(a, a, 8, 7, 0, c, s), "broadcast"),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree_are_told_at_issue_with_names_and_difference(
    machine, team, name, grouped, captured
):
    comms, streams, arrays = team
    wrong, text = MISMATCHES[name]
    if captured:
        for stream in streams:
            machine.cudart.cudaStreamBeginCapture(stream, 1)
    if grouped:
        machine.nccl.ncclGroupStart()
    machine.all_reduce(0, arrays[0][0], 8, comms, streams)
    code = machine.code(wrong, machine, arrays[1][0], comms[1], streams[1])
    if grouped:
        assert code == 0
        code = machine.code(machine.nccl.ncclGroupEnd)
    assert code == INVALID_USAGE
    report = machine.report()
    assert "rank 0" in report
    assert "rank 1" in report
    assert "all_reduce of 8 float32, sum" in report
    assert text in report
    if captured:
        for stream in streams:
            machine.cudart.cudaGraphDestroy(machine.end_capture(stream))
            machine._undo.pop()
    elif not grouped:
        machine.all_reduce(1, arrays[1][0], 8, comms, streams)  # the right one completes it
        machine.sync(*streams)
        assert (arrays[0][1] == 2).all()
    finish(machine, team)


def test_a_different_root_is_a_mismatch(machine, team):
    comms, streams, arrays = team
    broadcast = machine.nccl.ncclBroadcast
    broadcast(arrays[0][0], arrays[0][0], 8, 7, 0, comms[0], streams[0])
    wrong = (arrays[1][0], arrays[1][0], 8, 7, 1, comms[1], streams[1])
    assert machine.code(broadcast, *wrong) == INVALID_USAGE
    assert "root 0" in machine.report()
    assert "root 1" in machine.report()
    broadcast(arrays[1][0], arrays[1][0], 8, 7, 0, comms[1], streams[1])
    machine.sync(*streams)


def test_a_different_order_is_a_mismatch(machine, team):
    comms, streams, arrays = team
    machine.all_reduce(0, arrays[0][0], 8, comms, streams)
    machine.all_reduce(0, arrays[0][0], 4, comms, streams)
    assert machine.code(machine.all_reduce, 1, arrays[1][0], 4, comms, streams) == INVALID_USAGE
    machine.all_reduce(1, arrays[1][0], 8, comms, streams)
    machine.all_reduce(1, arrays[1][0], 4, comms, streams)
    machine.sync(*streams)


def test_transfers_that_disagree_are_a_mismatch(machine, team):
    comms, streams, arrays = team
    machine.nccl.ncclSend(arrays[0][0], 8, 7, 1, comms[0], streams[0])
    wrong = (arrays[1][0], 4, 7, 0, comms[1], streams[1])
    assert machine.code(machine.nccl.ncclRecv, *wrong) == INVALID_USAGE
    machine.nccl.ncclRecv(arrays[1][0], 8, 7, 0, comms[1], streams[1])
    machine.sync(*streams)


def captured(machine, team, rank, count):
    comms, streams, arrays = team
    machine.cudart.cudaStreamBeginCapture(streams[rank], 1)
    machine.all_reduce(rank, arrays[rank][0], count, comms, streams)
    return machine.instantiate(machine.end_capture(streams[rank]))


def test_graphs_that_disagree_are_told_at_launch_and_nothing_is_enqueued(machine, team):
    _, streams, arrays = team
    first, wrong, right = (captured(machine, team, r, c) for r, c in ((0, 8), (1, 4), (1, 8)))
    machine.replay(first, streams[0], 0)
    with machine.on(1):
        assert machine.code(machine.cudart.cudaGraphLaunch, wrong, streams[1]) == 1
    assert "all_reduce of 4 float32" in machine.report()
    machine.sync(streams[1])
    machine.replay(right, streams[1], 1)
    machine.sync(*streams)
    assert (arrays[0][1] == 2).all()


def test_a_failed_capture_leaves_no_mismatch_for_the_next(machine, team):
    comms, streams, arrays = team
    for stream in streams:
        machine.cudart.cudaStreamBeginCapture(stream, 1)
    machine.all_reduce(0, arrays[0][0], 8, comms, streams)
    machine.all_reduce(0, arrays[0][0], 4, comms, streams)
    machine.all_reduce(1, arrays[1][0], 8, comms, streams)
    assert machine.code(machine.cudart.cudaStreamSynchronize, streams[1]) == 900
    machine.end_capture(streams[0])
    assert machine.code(machine.cudart.cudaStreamEndCapture, streams[1], byref(c_void_p())) == 901
    for stream in streams:
        machine.cudart.cudaStreamBeginCapture(stream, 1)
    for rank in range(2):
        machine.all_reduce(rank, arrays[rank][0], 4, comms, streams)
    graphs = [machine.end_capture(stream) for stream in streams]
    execs = [machine.instantiate(graph) for graph in graphs]
    for rank in range(2):
        machine.replay(execs[rank], streams[rank], rank)
    machine.sync(*streams)
    assert list(arrays[0][1]) == [2] * 4 + [1] * 4


def test_a_group_over_captures_of_other_threads_records_into_them(machine, team):
    comms, streams, arrays = team
    begun, issued = threading.Barrier(3, timeout=20), threading.Barrier(3, timeout=20)
    graphs = [0, 0]

    def rank(number):
        machine.cudart.cudaStreamBeginCapture(streams[number], 1)
        begun.wait()
        issued.wait()
        graphs[number] = machine.end_capture(streams[number])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    machine.nccl.ncclGroupStart()
    for number in range(2):
        machine.all_reduce(number, arrays[number][0], 8, comms, streams)
    machine.nccl.ncclGroupEnd()
    issued.wait()
    for thread in threads:
        thread.join(20)
    assert [machine.nodes(graph) for graph in graphs] == [[0], [0]]
    for number, graph in enumerate(graphs):
        machine.replay(machine.instantiate(graph), streams[number], number)
    machine.sync(*streams)
    assert (arrays[1][1] == 2).all()


def test_communicators_on_one_device_twice_or_on_none_are_refused(machine):
    handles = (c_void_p * 2)()
    twice = (c_int * 2)(1, 1)
    assert machine.code(machine.nccl.ncclCommInitAll, handles, 2, twice) == INVALID_USAGE
    assert "named twice" in machine.report()
    assert machine.code(machine.nccl.ncclCommInitAll, handles, 5, None) == INVALID_ARGUMENT
    assert machine.code(machine.nccl.ncclCommInitAll, handles, 0, None) == INVALID_ARGUMENT
    assert machine.live("comms") == 0


def test_windows_lie_on_4096_bytes_and_are_given_back_before_the_communicator(machine, team):
    comms, _, _ = team
    pointer, window = c_void_p(), c_void_p()
    machine.nccl.ncclMemAlloc(byref(pointer), 8192)
    register = machine.nccl.ncclCommWindowRegister
    late = (comms[0], pointer.value + 4, 4096, byref(window), 1)
    assert machine.code(register, *late) == INVALID_ARGUMENT
    register(comms[0], pointer, 8192, byref(window), 1)
    assert machine.code(machine.nccl.ncclCommDestroy, comms[0]) == INVALID_USAGE
    assert "window" in machine.report()
    machine.nccl.ncclCommWindowDeregister(comms[0], window)
    handle = c_void_p()
    machine.nccl.ncclCommRegister(comms[0], pointer, 8192, byref(handle))
    machine.nccl.ncclCommDeregister(comms[0], handle)
    assert machine.code(machine.nccl.ncclCommDeregister, comms[0], handle) == INVALID_ARGUMENT
    machine.nccl.ncclMemFree(pointer)
