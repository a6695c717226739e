"""Symmetric windows, and factors on device memory: what is taken and what is refused."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(60)

RANKS, NBYTES = 2, 8192
SYMMETRIC = 1
INVALID_ARGUMENT, INVALID_USAGE = 4, 5


@pytest.fixture
def ranks(machine):
    """(communicators, memory by ncclMemAlloc) of two ranks."""
    comms = machine.comms(RANKS)
    memory = []
    for rank in range(RANKS):
        pointer = c_void_p()
        with machine.on(rank):
            machine.nccl.ncclMemAlloc(byref(pointer), NBYTES)
        memory.append(machine._made(machine.nccl.ncclMemFree, pointer.value))
    return comms, memory


def register(machine, comms, memory, sizes=(NBYTES, NBYTES)):
    """The windows of all ranks, registered in one group."""
    windows = [c_void_p(1) for _ in comms]
    machine.nccl.ncclGroupStart()
    for comm, address, nbytes, window in zip(comms, memory, sizes, windows, strict=True):
        machine.nccl.ncclCommWindowRegister(comm, address, nbytes, byref(window), SYMMETRIC)
        assert window.value is None  # it comes with the end of the group
    code = machine.code(machine.nccl.ncclGroupEnd)
    return code, windows


def test_windows_of_one_group_come_with_its_end(machine, ranks):
    comms, memory = ranks
    code, windows = register(machine, comms, memory)
    assert code == 0
    assert machine.live("windows") == RANKS
    for comm, window in zip(comms, windows, strict=True):
        machine.nccl.ncclCommWindowDeregister(comm, window)
    assert machine.live("windows") == 0


def test_a_poisoned_group_registers_nothing(machine, ranks):
    comms, memory = ranks
    window = c_void_p()
    machine.nccl.ncclGroupStart()
    machine.nccl.ncclCommWindowRegister(comms[0], memory[0], NBYTES, byref(window), SYMMETRIC)
    assert machine.code(machine.nccl.ncclAllReduce, None, None, 0, 7, 0, None, None)
    assert machine.code(machine.nccl.ncclGroupEnd)
    assert window.value is None
    assert machine.live("windows") == 0


def test_sizes_that_differ_between_ranks_are_refused_and_undone(machine, ranks):
    comms, memory = ranks
    code, windows = register(machine, comms, memory, (NBYTES, 4096))
    assert code == INVALID_USAGE
    assert "rank 0 has 8192 bytes, rank 1 4096" in machine.report()
    assert machine.live("windows") == 0
    assert [window.value for window in windows] == [None, None]
    code, windows = register(machine, comms, memory)
    assert code == 0
    for comm, window in zip(comms, windows, strict=True):
        machine.nccl.ncclCommWindowDeregister(comm, window)


def test_only_memory_that_others_can_map_takes_a_window(machine, ranks):
    comms, _ = ranks
    plain = machine.malloc(NBYTES)
    window = c_void_p()
    arguments = (comms[0], plain, NBYTES, byref(window), SYMMETRIC)
    assert machine.code(machine.nccl.ncclCommWindowRegister, *arguments) == INVALID_ARGUMENT
    assert "ncclMemAlloc" in machine.report()


def test_the_two_kinds_of_memory_are_freed_each_by_its_own(machine, ranks):
    _, memory = ranks
    plain = machine.malloc(NBYTES)
    assert machine.code(machine.cudart.cudaFree, memory[0]) != 0
    assert machine.code(machine.nccl.ncclMemFree, plain) != 0


def test_memory_under_a_window_cannot_be_freed(machine, ranks):
    comms, memory = ranks
    _, windows = register(machine, comms, memory)
    assert machine.code(machine.nccl.ncclMemFree, memory[1]) == INVALID_USAGE
    assert "a window of rank 1 lies on this memory" in machine.report()
    for comm, window in zip(comms, windows, strict=True):
        machine.nccl.ncclCommWindowDeregister(comm, window)


def test_graphs_go_before_windows_and_windows_before_communicators(machine, ranks):
    comms, memory = ranks
    _, windows = register(machine, comms, memory)
    streams = [machine.stream(rank) for rank in range(RANKS)]
    for stream in streams:
        machine.cudart.cudaStreamBeginCapture(stream, 1)
    machine.nccl.ncclGroupStart()
    for rank in range(RANKS):
        machine.all_reduce(rank, memory[rank], 8, comms, streams)
    machine.nccl.ncclGroupEnd()
    graphs = [machine.end_capture(stream) for stream in streams]
    deregister = machine.nccl.ncclCommWindowDeregister
    assert machine.code(deregister, comms[0], windows[0]) == INVALID_USAGE
    assert "graphs" in machine.report()
    for graph in graphs:
        machine.forget(graph)
        machine.cudart.cudaGraphDestroy(graph)
    assert machine.code(machine.nccl.ncclCommDestroy, comms[0]) == INVALID_USAGE
    for comm, window in zip(comms, windows, strict=True):
        deregister(comm, window)


def test_an_abort_takes_the_windows_with_it(machine, ranks):
    comms, memory = ranks
    register(machine, comms, memory)
    for comm in comms:
        machine.forget(comm)
        machine.nccl.ncclCommAbort(comm)
    assert machine.live("windows") == 0


def test_a_factor_must_lie_in_memory_of_its_rank(machine, ranks):
    comms, _ = ranks
    address, _ = machine.array([0.5], np.float32, 1)
    op = c_int()
    create = machine.nccl.ncclRedOpCreatePreMulSum
    assert machine.code(create, byref(op), address, 7, 0, comms[0]) == INVALID_ARGUMENT
    assert "memory of device 0" in machine.report()
    create(byref(op), address, 7, 0, comms[1])
    assert machine.live("reductions") == 1
    machine.nccl.ncclRedOpDestroy(op, comms[1])
    assert machine.live("reductions") == 0
