"""Streams, events and memory of the host device."""

from __future__ import annotations

import threading
import time
from ctypes import byref, c_int, c_size_t, c_void_p

import numpy as np
import pytest

from trlow.binding.cudart import cudaHostFn_t
from trlow.errors import CudaError

pytestmark = pytest.mark.timeout(60)


def test_a_stream_runs_in_order(machine):
    stream = machine.stream()
    address, view = machine.array(np.zeros(64), np.uint8)
    for value in range(1, 201):
        machine.cudart.cudaMemsetAsync(address, value, 64, stream)
        machine.cudart.cudaMemsetAsync(address, 255 - value, 32, stream)
    machine.sync(stream)
    assert (view == [55] * 32 + [200] * 32).all()


def test_host_functions_run_in_order_off_the_calling_thread_and_may_call_python(machine):
    stream = machine.stream()
    seen = []
    functions = [
        cudaHostFn_t(lambda _, n=n: seen.append((n, threading.get_ident()))) for n in range(20)
    ]
    for function in functions:
        machine.cudart.cudaLaunchHostFunc(stream, function, None)
    machine.sync(stream)
    assert [n for n, _ in seen] == list(range(20))
    assert threading.get_ident() not in {ident for _, ident in seen}


def test_a_host_function_cannot_call_cuda(machine):
    stream = machine.stream()
    codes = []
    function = cudaHostFn_t(
        lambda _: codes.append(machine.code(machine.cudart.cudaStreamSynchronize, stream))
    )
    machine.cudart.cudaLaunchHostFunc(stream, function, None)
    machine.sync(stream)
    assert codes == [800]


def blocker(machine, stream):
    """Work that holds the stream until the returned event is set."""
    gate = threading.Event()
    function = cudaHostFn_t(lambda _: gate.wait(20))
    machine.cudart.cudaLaunchHostFunc(stream, function, None)
    gate.function = function
    return gate


def test_another_streams_event_holds_work_back_and_streams_are_otherwise_independent(machine):
    first, second, third = (machine.stream() for _ in range(3))
    event = machine.event()
    address, view = machine.array(np.zeros(3), np.uint8)
    gate = blocker(machine, first)
    machine.cudart.cudaMemsetAsync(address, 1, 1, first)
    machine.cudart.cudaEventRecord(event, first)
    machine.cudart.cudaStreamWaitEvent(second, event, 0)
    machine.cudart.cudaMemsetAsync(address + 1, 2, 1, second)
    machine.cudart.cudaMemsetAsync(address + 2, 3, 1, third)
    machine.sync(third)
    assert list(view) == [0, 0, 3]
    assert machine.cudart.cudaStreamQuery(second) == 600
    assert machine.cudart.cudaEventQuery(event) == 600
    gate.set()
    machine.sync(second)
    assert list(view) == [1, 2, 3]
    assert machine.cudart.cudaEventQuery(event) == 0


def test_a_wait_keeps_the_record_that_it_saw(machine):
    first, second, third = (machine.stream() for _ in range(3))
    event = machine.event()
    gate = blocker(machine, first)
    machine.cudart.cudaEventRecord(event, second)
    machine.cudart.cudaStreamWaitEvent(third, event, 0)
    machine.cudart.cudaEventRecord(event, first)  # held back, but third waits for the record before
    machine.sync(third)
    assert machine.cudart.cudaEventQuery(event) == 600
    gate.set()
    machine.cudart.cudaEventSynchronize(event)
    assert machine.cudart.cudaEventQuery(event) == 0


def test_an_event_never_recorded_is_complete_and_holds_nothing(machine):
    stream, event = machine.stream(), machine.event()
    assert machine.cudart.cudaEventQuery(event) == 0
    machine.cudart.cudaStreamWaitEvent(stream, event, 0)
    machine.cudart.cudaEventSynchronize(event)
    machine.sync(stream)


def test_elapsed_time_needs_two_recorded_events_with_timing(machine):
    stream = machine.stream()
    start, end, untimed = machine.event(flags=0), machine.event(flags=0), machine.event()
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        machine.elapsed(start, end)
    machine.cudart.cudaEventRecord(start, stream)
    sleeper = cudaHostFn_t(lambda _: time.sleep(0.02))
    machine.cudart.cudaLaunchHostFunc(stream, sleeper, None)
    machine.cudart.cudaEventRecord(end, stream)
    machine.cudart.cudaEventRecord(untimed, stream)
    machine.sync(stream)
    assert 20 <= machine.elapsed(start, end) < 5000
    with pytest.raises(CudaError):
        machine.elapsed(start, untimed)


def test_a_destroyed_stream_finishes_its_work(machine):
    stream = machine.stream()
    address, view = machine.array([0], np.uint8)
    gate = blocker(machine, stream)
    machine.cudart.cudaMemsetAsync(address, 7, 1, stream)
    machine.cudart.cudaStreamDestroy(stream)
    machine.forget(stream)
    assert machine.code(machine.cudart.cudaStreamSynchronize, stream) == 400
    gate.set()
    machine.cudart.cudaDeviceSynchronize()
    assert view[0] == 7


def test_device_synchronize_waits_for_this_device_only(machine):
    here, there = machine.stream(0), machine.stream(1)
    address, view = machine.array([0], np.uint8)
    gate = blocker(machine, there)
    machine.cudart.cudaMemsetAsync(address, 7, 1, here)
    machine.cudart.cudaDeviceSynchronize()
    assert view[0] == 7
    assert machine.cudart.cudaStreamQuery(there) == 600
    gate.set()
    machine.sync(there)


def test_the_current_device_belongs_to_the_thread(machine):
    machine.cudart.cudaSetDevice(2)
    seen = []

    def ask():
        device = c_int(-1)
        machine.cudart.cudaGetDevice(byref(device))
        seen.append(device.value)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    ask()
    assert seen == [0, 2]
    machine.cudart.cudaSetDevice(0)


def test_handles_of_another_device_and_handles_of_nothing_are_refused(machine):
    address, _ = machine.array([1.0], np.float32, 1)
    stream, event = machine.stream(1), machine.event(0)
    machine.function("scale_f32", 0)
    cases = [
        (machine.cudart.cudaEventRecord, event, stream),
        (machine.cudart.cudaStreamSynchronize, None),
        (machine.cudart.cudaStreamSynchronize, 0xDEAD0),
        (machine.cudart.cudaMemsetAsync, address, 0, 4, None),
        (machine.cudart.cudaEventQuery, 0xDEAD0),
    ]
    for function, *arguments in cases:
        assert machine.code(function, *arguments) == 400
    with pytest.raises(CudaError) as caught:  # stream and kernel belong to different devices
        machine.launch(stream, "scale_f32", address, address, 1, device=0)
    assert caught.value.code == 400
    machine.launch(stream, "scale_f32", address, address, 1, device=1)
    machine.sync(stream)


def test_memory_is_aligned_not_zero_counted_and_limited(machine):
    machine.configure(device_nbytes=1 << 20)
    free, total = c_size_t(), c_size_t()
    address = machine.malloc(1000)
    assert address % 4096 == 0
    assert set(machine.view(address, 1000, np.uint8)) == {0xCB}
    machine.cudart.cudaMemGetInfo(byref(free), byref(total))
    assert (free.value, total.value) == ((1 << 20) - 1000, 1 << 20)
    pointer = c_void_p(5)
    assert machine.code(machine.cudart.cudaMalloc, byref(pointer), 1 << 20) == 2
    assert machine.code(machine.cudart.cudaMalloc, byref(pointer), 2**64 - 1) == 2
    assert pointer.value is None
    machine.malloc(1 << 20, device=1)  # the limit is each device's own
    assert machine.live("allocations") == 2


def test_memory_operations_outside_an_allocation_are_refused(machine):
    stream = machine.stream()
    address, view = machine.array(np.zeros(100), np.uint8)
    ordinary = np.zeros(200, np.uint8)
    source = ordinary.ctypes.data
    assert machine.code(machine.cudart.cudaMemsetAsync, address, 1, 101, stream) == 1
    assert machine.code(machine.cudart.cudaMemsetAsync, source, 1, 1, stream) == 1
    assert machine.code(machine.cudart.cudaMemcpyAsync, address, source, 101, 1, stream) == 1
    assert machine.code(machine.cudart.cudaMemcpyAsync, source, source, 8, 3, stream) == 1
    assert machine.code(machine.cudart.cudaMemcpyAsync, address, source, 8, 9, stream) == 21
    assert machine.code(machine.cudart.cudaFree, address + 1) == 1
    assert machine.code(machine.cudart.cudaFreeHost, address) == 1
    machine.cudart.cudaMemcpyAsync(address, source, 100, 1, stream)
    machine.sync(stream)
    assert not view.any()


def test_free_waits_for_the_device_and_a_null_pointer_is_nothing(machine):
    stream = machine.stream()
    address, _ = machine.array([0], np.uint8)
    gate = blocker(machine, stream)
    machine.cudart.cudaMemsetAsync(address, 1, 1, stream)
    freed = threading.Thread(target=machine.cudart.cudaFree, args=(address,))
    machine.forget(address)
    freed.start()
    freed.join(0.05)
    assert freed.is_alive()
    gate.set()
    freed.join(10)
    assert not freed.is_alive()
    machine.cudart.cudaFree(None)


def test_sixty_four_devices(machine):
    machine.configure(devices=64)
    count = c_int()
    machine.cudart.cudaGetDeviceCount(byref(count))
    assert count.value == 64
    comms = machine.comms(64)
    streams = [machine.stream(rank) for rank in range(64)]
    arrays = [machine.array([rank] * 5, np.float32, rank) for rank in range(64)]
    for rank in range(64):
        machine.all_reduce(rank, arrays[rank][0], 5, comms, streams)
    machine.sync(*streams)
    assert all((view == 63 * 64 / 2).all() for _, view in arrays)
    assert machine.code(machine.host.trlowHostConfigure, 8, 0, 0, 0) == 401
    assert "device 63" in machine.report()
