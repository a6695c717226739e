"""Any call can be made to fail; then it has changed nothing, except that an end still ends."""

from __future__ import annotations

import threading
from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

from trlow.binding import cudart, driver, nccl

pytestmark = pytest.mark.timeout(60)

CODE = 9  # no call returns it by itself
INFALLIBLE = {
    "cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError", "cudaPeekAtLastError",
    "cuGetErrorName", "cuGetErrorString", "ncclGetErrorString", "ncclGetLastError",
}  # fmt: skip


def exported(machine):
    """(library, name) of every function that the host device has of the three interfaces."""
    pairs = [
        (machine.cudart, cudart.INTERFACE), (machine.driver, driver.INTERFACE),
        (machine.nccl, nccl.INTERFACE),
    ]  # fmt: skip
    return [
        (library, name)
        for library, interface in pairs
        for name in interface.prototypes
        if library.has(name)
    ]


def zeros(function):
    """Null for every pointer, 0 for every number."""
    return [kind() for kind in function.argtypes]


def test_every_fallible_call_fails_when_asked_to_before_it_looks_at_its_arguments(machine):
    names = exported(machine)
    assert len(names) > 100
    for library, name in names:
        if name in INFALLIBLE:
            assert machine.code(machine.host.trlowHostFail, name.encode(), 1, CODE) == 1
            continue
        machine.host.trlowHostFail(name.encode(), 1, CODE)
        before = machine.host.trlowHostCalls(name.encode())
        function = getattr(library, name)
        assert machine.code(function, *zeros(function)) == CODE, name
        assert machine.host.trlowHostCalls(name.encode()) == before + 1


def test_every_call_refuses_nulls_or_takes_them_but_never_crashes(machine):
    for library, name in exported(machine):
        if name in {"ncclGroupStart", "ncclCommInitAll"}:  # the first opens a group
            continue
        function = getattr(library, name)
        machine.code(function, *zeros(function))


def test_the_nth_call_fails_once_and_others_do_not_count(machine):
    event, stream = machine.event(), machine.stream()
    record = machine.cudart.cudaEventRecord
    machine.host.trlowHostFail(b"cudaEventRecord", 3, CODE)
    codes = []
    for _ in range(5):
        machine.cudart.cudaStreamQuery(stream)
        codes.append(machine.code(record, event, stream))
    assert codes == [0, 0, CODE, 0, 0]
    assert machine.cudart.cudaGetLastError() == CODE
    assert machine.cudart.cudaGetLastError() == 0


def test_any_call_by_star_and_clearing_by_zero(machine):
    stream, device = machine.stream(), c_int()
    machine.host.trlowHostFail(b"*", 2, CODE)
    machine.host.trlowHostFail(b"cudaStreamQuery", 1, 8)
    machine.host.trlowHostFail(b"cudaStreamQuery", 0, 0)
    before = machine.host.trlowHostCalls(b"*")
    assert machine.code(machine.cudart.cudaStreamQuery, stream) == 0
    assert machine.code(machine.cudart.cudaGetDevice, byref(device)) == CODE
    assert machine.host.trlowHostCalls(b"*") == before + 2
    machine.host.trlowHostFail(b"*", 1, CODE)
    machine.host.trlowHostFail(b"*", 0, 0)
    machine.cudart.cudaStreamQuery(stream)


def test_an_unknown_function_cannot_be_made_to_fail(machine):
    assert machine.code(machine.host.trlowHostFail, b"cudaMaloc", 1, CODE) == 1
    assert machine.host.trlowHostCalls(b"cudaMaloc") == -1
    assert machine.host.trlowHostLive(b"thing") == -1


def test_a_failing_end_of_a_capture_ends_it(machine):
    stream, graph = machine.stream(), c_void_p(1)
    machine.cudart.cudaStreamBeginCapture(stream, 1)
    machine.host.trlowHostFail(b"cudaStreamEndCapture", 1, CODE)
    assert machine.code(machine.cudart.cudaStreamEndCapture, stream, byref(graph)) == CODE
    assert graph.value is None
    assert machine.live("captures") == machine.live("graphs") == 0
    machine.sync(stream)


@pytest.mark.parametrize("name", [b"ncclAllReduce", b"ncclGroupEnd"])
def test_a_failure_inside_a_group_ends_it_and_launches_nothing(machine, name):
    comms = machine.comms(2)
    streams = [machine.stream(rank) for rank in range(2)]
    arrays = [machine.array([1.0], np.float32, rank) for rank in range(2)]
    machine.host.trlowHostFail(name, 1, CODE)
    machine.nccl.ncclGroupStart()
    codes = [machine.code(machine.all_reduce, r, arrays[r][0], 1, comms, streams) for r in (0, 1)]
    codes.append(machine.code(machine.nccl.ncclGroupEnd))
    assert codes == ([CODE, 0, CODE] if name == b"ncclAllReduce" else [0, 0, CODE])
    machine.sync(*streams)
    assert arrays[0][1][0] == 1
    for rank in range(2):  # no group is open: these are issued at once
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
    machine.sync(*streams)
    assert arrays[0][1][0] == 2


def test_a_failing_release_leaves_the_object_alive(machine):
    event = machine.event()
    machine.host.trlowHostFail(b"cudaEventDestroy", 1, CODE)
    assert machine.code(machine.cudart.cudaEventDestroy, event) == CODE
    assert machine.live("events") == 1
    machine.cudart.cudaEventRecord(event, machine.stream())


def test_the_last_error_belongs_to_the_thread(machine):
    assert machine.code(machine.cudart.cudaSetDevice, 77) == 101
    seen = []
    thread = threading.Thread(target=lambda: seen.append(machine.cudart.cudaPeekAtLastError()))
    thread.start()
    thread.join(10)
    assert seen == [0]
    assert machine.cudart.cudaPeekAtLastError() == 101
    assert machine.cudart.cudaGetLastError() == 101
    assert machine.cudart.cudaGetLastError() == 0
