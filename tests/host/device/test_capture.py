"""Capture and graphs of the host device: what is recorded, what is refused, what replay does."""

from __future__ import annotations

import threading
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p

import numpy as np
import pytest

from trlow.binding.cudart import cudaHostFn_t

pytestmark = pytest.mark.timeout(60)

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
KERNEL, MEMCPY, MEMSET, HOST, GRAPH, EMPTY = range(6)


def in_thread(function, *arguments):
    """Call it on another thread; its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function(*arguments)))
    thread.start()
    thread.join(20)
    return result[0]


def status(machine, stream):
    value = c_int()
    machine.cudart.cudaStreamIsCapturing(stream, byref(value))
    return value.value


def failed_end(machine, stream):
    """The code of an EndCapture that gives no graph."""
    graph = c_void_p(1)
    code = machine.code(machine.cudart.cudaStreamEndCapture, stream, byref(graph))
    assert graph.value is None
    return code


def test_capture_runs_nothing_and_replay_does(machine):
    stream = machine.stream()
    address, view = machine.array([1.0, 2.0], np.float32)
    factor, _ = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert status(machine, stream) == 1
    machine.scale(stream, address, factor, 2)
    machine.cudart.cudaMemsetAsync(address + 4, 0, 4, stream)
    graph = machine.end_capture(stream)
    assert status(machine, stream) == 0
    assert machine.nodes(graph) == [KERNEL, MEMSET]
    exec_ = machine.instantiate(graph)
    machine.cudart.cudaGraphUpload(exec_, stream)
    machine.sync(stream)
    assert list(view) == [1, 2]
    for expected in (2, 4, 8):
        machine.replay(exec_, stream)
        machine.sync(stream)
        assert list(view) == [expected, 0]


def test_arguments_are_frozen_at_capture_but_memory_is_read_at_replay(machine):
    stream = machine.stream()
    address, view = machine.array([1.0], np.float32)
    factor, factors = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    machine.scale(stream, address, factor, 1)
    exec_ = machine.instantiate(machine.end_capture(stream))
    factors[0] = 5
    machine.replay(exec_, stream)
    machine.sync(stream)
    assert view[0] == 5


def test_fork_and_join_by_events_inside_a_capture(machine):
    origin, side = machine.stream(), machine.stream()
    forked, joined = machine.event(), machine.event()
    address, view = machine.array(np.zeros(4), np.uint8)
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    machine.cudart.cudaMemsetAsync(address, 1, 2, origin)
    machine.cudart.cudaEventRecord(forked, origin)
    machine.cudart.cudaStreamWaitEvent(side, forked, 0)
    assert status(machine, side) == 1
    machine.cudart.cudaMemcpyAsync(address + 2, address, 2, 3, side)
    machine.cudart.cudaEventRecord(joined, side)
    machine.cudart.cudaStreamWaitEvent(origin, joined, 0)
    machine.cudart.cudaMemsetAsync(address, 9, 1, origin)
    graph = machine.end_capture(origin)
    assert status(machine, side) == 0
    assert machine.nodes(graph) == [MEMSET, MEMCPY, MEMSET]  # events are edges, not nodes
    exec_ = machine.instantiate(graph)
    machine.replay(exec_, origin)
    machine.sync(origin)
    assert list(view) == [9, 1, 1, 1]


def test_work_that_is_not_joined_is_an_error_and_ends_the_capture(machine):
    origin, side, event = machine.stream(), machine.stream(), machine.event()
    address, _ = machine.array([0], np.uint8)
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    machine.cudart.cudaEventRecord(event, origin)
    machine.cudart.cudaStreamWaitEvent(side, event, 0)
    machine.cudart.cudaMemsetAsync(address, 1, 1, side)
    assert failed_end(machine, origin) == 904
    assert status(machine, origin) == status(machine, side) == 0
    machine.cudart.cudaMemsetAsync(address, 1, 1, side)  # usable again
    machine.sync(side, origin)


def test_a_stream_that_joined_but_did_nothing_needs_no_join(machine):
    origin, side, event = machine.stream(), machine.stream(), machine.event()
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    machine.cudart.cudaEventRecord(event, origin)
    machine.cudart.cudaStreamWaitEvent(side, event, 0)
    machine.end_capture(origin)


FORBIDDEN = {
    "synchronize": lambda m, s, e, g: m.code(m.cudart.cudaStreamSynchronize, s),
    "query": lambda m, s, e, g: m.code(m.cudart.cudaStreamQuery, s),
    "malloc": lambda m, s, e, g: m.code(m.cudart.cudaMalloc, byref(c_void_p()), 8),
    "free": lambda m, s, e, g: m.code(m.cudart.cudaFree, None),
    "host alloc": lambda m, s, e, g: m.code(m.cudart.cudaHostAlloc, byref(c_void_p()), 8, 0),
    "event query": lambda m, s, e, g: m.code(m.cudart.cudaEventQuery, e),
    "event synchronize": lambda m, s, e, g: m.code(m.cudart.cudaEventSynchronize, e),
    "device synchronize": lambda m, s, e, g: m.code(m.cudart.cudaDeviceSynchronize),
    "instantiate": lambda m, s, e, g: m.code(
        m.cudart.cudaGraphInstantiate, byref(c_void_p()), g, 0
    ),
    "module": lambda m, s, e, g: m.code(
        m.driver.cuModuleLoadData, byref(c_void_p()), b"trlow-host-kernels"
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_call_fails_and_invalidates_the_capture_which_must_still_be_ended(
    machine, name
):
    stream, event = machine.stream(), machine.event()
    empty = c_void_p()
    machine.cudart.cudaGraphCreate(byref(empty), 0)
    machine._made(machine.cudart.cudaGraphDestroy, empty.value)
    address, _ = machine.array([0], np.uint8)
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert FORBIDDEN[name](machine, stream, event, empty.value) == 900
    assert status(machine, stream) == 2
    assert machine.code(machine.cudart.cudaMemsetAsync, address, 1, 1, stream) == 901
    assert machine.code(machine.cudart.cudaEventRecord, event, stream) == 901
    assert machine.live("captures") == 1
    assert failed_end(machine, stream) == 901
    assert status(machine, stream) == 0
    machine.sync(stream)


def test_modes_say_whose_calls_are_forbidden(machine):
    stream = machine.stream(1)
    malloc_and_free = lambda: machine.cudart.cudaFree(machine.forget_malloc())  # noqa: E731
    machine.forget_malloc = lambda: (machine.malloc(8), machine._undo.pop())[0]
    for mode, mine, another in ((GLOBAL, 900, 900), (THREAD_LOCAL, 900, 0), (RELAXED, 0, 0)):
        for call, expected in ((lambda f: f(), mine), (in_thread, another)):
            machine.cudart.cudaStreamBeginCapture(stream, mode)
            assert call(lambda: machine.code(malloc_and_free)) == expected
            if expected:
                assert failed_end(machine, stream) == 901
            else:
                machine.end_capture(stream)


def test_a_thread_may_exchange_its_mode(machine):
    stream = machine.stream(1)
    mode = c_int(RELAXED)
    machine.cudart.cudaThreadExchangeStreamCaptureMode(byref(mode))
    assert mode.value == GLOBAL
    machine.cudart.cudaStreamBeginCapture(stream, GLOBAL)
    machine.malloc(8)
    machine.cudart.cudaThreadExchangeStreamCaptureMode(byref(mode))
    assert mode.value == RELAXED
    machine.end_capture(stream)


def test_a_query_from_another_thread_breaks_captures_on_its_own_device_only(machine):
    here, there = machine.stream(0), machine.stream(1)
    other = machine.stream(0)
    for stream, code in ((there, 0), (here, 900)):
        machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
        assert in_thread(machine.code, machine.cudart.cudaStreamQuery, other) == code
        if code:
            assert failed_end(machine, stream) == 901
        else:
            machine.end_capture(stream)


def test_ending_on_another_thread_stream_or_twice_is_refused(machine):
    origin, side, event = machine.stream(), machine.stream(), machine.event()
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    assert machine.code(machine.cudart.cudaStreamBeginCapture, origin, THREAD_LOCAL) == 401
    assert in_thread(failed_end, machine, origin) == 908
    machine.end_capture(origin)
    assert failed_end(machine, origin) == 401
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    machine.cudart.cudaEventRecord(event, origin)
    machine.cudart.cudaStreamWaitEvent(side, event, 0)
    assert failed_end(machine, side) == 903
    assert failed_end(machine, origin) == 901


def test_a_capture_neither_depends_on_outside_work_nor_merges_with_another(machine):
    first, second = machine.stream(), machine.stream()
    outside, inside = machine.event(), machine.event()
    machine.cudart.cudaEventRecord(outside, first)
    machine.sync(first)
    machine.cudart.cudaStreamBeginCapture(first, THREAD_LOCAL)
    assert machine.code(machine.cudart.cudaStreamWaitEvent, first, outside, 0) == 905
    assert failed_end(machine, first) == 901
    machine.cudart.cudaStreamBeginCapture(first, THREAD_LOCAL)
    machine.cudart.cudaStreamBeginCapture(second, THREAD_LOCAL)
    machine.cudart.cudaEventRecord(inside, first)
    assert machine.code(machine.cudart.cudaStreamWaitEvent, second, inside, 0) == 902
    assert failed_end(machine, first) == failed_end(machine, second) == 901


def test_a_captured_event_cannot_be_asked_until_it_is_recorded_again(machine):
    stream, event = machine.stream(), machine.event()
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    machine.cudart.cudaEventRecord(event, stream)
    assert machine.code(machine.cudart.cudaEventQuery, event) == 907
    assert failed_end(machine, stream) == 901
    assert machine.code(machine.cudart.cudaEventSynchronize, event) == 907
    machine.cudart.cudaEventRecord(event, stream)
    machine.cudart.cudaEventSynchronize(event)


def test_a_capturing_stream_cannot_be_destroyed(machine):
    stream = machine.stream()
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert machine.code(machine.cudart.cudaStreamDestroy, stream) == 900
    assert failed_end(machine, stream) == 901


def increment(machine, stream, address):
    """Captures x = 2 x + 0 over one float, as a graph of one kernel."""
    factor, _ = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    machine.scale(stream, address, factor, 1)
    return machine.end_capture(stream)


def test_child_graphs_run_inside_their_parent_and_outlive_their_original(machine):
    stream = machine.stream()
    address, view = machine.array([1.0], np.float32)
    child = increment(machine, stream, address)
    parent, node, inner = c_void_p(), c_void_p(), c_void_p()
    machine.cudart.cudaGraphCreate(byref(parent), 0)
    machine._made(machine.cudart.cudaGraphDestroy, parent.value)
    machine.cudart.cudaGraphAddChildGraphNode(byref(node), parent, None, 0, child)
    after = (c_void_p * 1)(node.value)
    machine.cudart.cudaGraphAddChildGraphNode(byref(c_void_p()), parent, after, 1, child)
    assert machine.nodes(parent.value) == [GRAPH, GRAPH]
    machine.cudart.cudaGraphChildGraphNodeGetGraph(node, byref(inner))
    assert inner.value != child
    assert machine.nodes(inner.value) == [KERNEL]
    assert machine.code(machine.cudart.cudaGraphDestroy, inner) == 1  # it is its parent's
    assert machine.live("graphs") == 2
    machine.cudart.cudaGraphDestroy(child)
    machine.forget(child)
    machine.replay(machine.instantiate(parent.value), stream)
    machine.sync(stream)
    assert view[0] == 4


def test_a_launch_into_a_capturing_stream_is_refused_and_spoils_the_capture(machine):
    stream = machine.stream()
    address, _ = machine.array([1.0], np.float32)
    exec_ = machine.instantiate(increment(machine, stream, address))
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert machine.code(machine.cudart.cudaGraphLaunch, exec_, stream) == 900
    graph = c_void_p()
    assert machine.code(machine.cudart.cudaStreamEndCapture, stream, byref(graph)) == 901


def add_child(machine, stream, child):
    """Put `child` behind what `stream` has captured so far, as the driver's guide says."""
    status, identity, count = c_int(), c_uint64(), c_size_t()
    parent, node, last = c_void_p(), c_void_p(), POINTER(c_void_p)()
    machine.driver.cuStreamGetCaptureInfo_v3(
        stream, byref(status), byref(identity), byref(parent), byref(last), None, byref(count)
    )
    assert status.value == 1
    machine.cudart.cudaGraphAddChildGraphNode(byref(node), parent, last, count.value, child)
    machine.driver.cuStreamUpdateCaptureDependencies_v2(stream, byref(node), None, 1, 1)


def test_a_child_graph_takes_its_place_in_a_capture(machine):
    stream = machine.stream()
    address, view = machine.array([1.0], np.float32)
    child = increment(machine, stream, address)
    three, _ = machine.array([3.0], np.float32)
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    add_child(machine, stream, child)
    machine.scale(stream, address, three, 1)
    add_child(machine, stream, child)
    graph = machine.end_capture(stream)
    assert machine.nodes(graph) == [GRAPH, 0, GRAPH]
    assert view[0] == 1
    machine.replay(machine.instantiate(graph), stream)
    machine.sync(stream)
    assert view[0] == 12


def test_a_graph_that_was_asked_for_is_gone_when_its_capture_fails(machine):
    stream = machine.stream()
    address, _ = machine.array([1.0], np.float32)
    child = increment(machine, stream, address)
    before = machine.host.trlowHostLive(b"graphs")
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    add_child(machine, stream, child)
    machine.code(machine.cudart.cudaStreamSynchronize, stream)
    assert machine.code(machine.cudart.cudaStreamEndCapture, stream, byref(c_void_p())) == 901
    assert machine.host.trlowHostLive(b"graphs") == before


def test_an_executable_graph_outlives_its_graph_and_runs_once_at_a_time(machine):
    streams = [machine.stream(), machine.stream()]
    address, view = machine.array([1.0], np.float32)
    graph = increment(machine, streams[0], address)
    exec_ = machine.instantiate(graph)
    machine.cudart.cudaGraphDestroy(graph)
    machine.forget(graph)
    for number in range(10):
        machine.replay(exec_, streams[number % 2])
    machine.cudart.cudaGraphExecDestroy(exec_)  # while it runs
    machine.forget(exec_)
    machine.sync(*streams)
    assert view[0] == 1024
    assert machine.code(machine.cudart.cudaGraphLaunch, exec_, streams[0]) == 1


def test_a_graph_launches_with_its_streams_device_current(machine):
    stream = machine.stream(1)
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    exec_ = machine.instantiate(machine.end_capture(stream))
    assert machine.code(machine.cudart.cudaGraphLaunch, exec_, stream) == 400
    assert machine.code(machine.cudart.cudaGraphUpload, exec_, stream) == 400
    machine.replay(exec_, stream, device=1)
    machine.sync(stream)


def test_a_host_function_and_a_chain_of_ten_thousand_nodes(machine):
    stream = machine.stream()
    count = []
    function = cudaHostFn_t(lambda _: count.append(1))
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    for _ in range(3):
        machine.cudart.cudaLaunchHostFunc(stream, function, None)
    graph = machine.end_capture(stream)
    assert machine.nodes(graph) == [HOST] * 3
    parent = c_void_p()
    machine.cudart.cudaGraphCreate(byref(parent), 0)
    machine._made(machine.cudart.cudaGraphDestroy, parent.value)
    last = (c_void_p * 1)()
    for number in range(10_000):
        node = c_void_p()
        after = last if number else None
        machine.cudart.cudaGraphAddEmptyNode(byref(node), parent, after, min(number, 1))
        last[0] = node.value
    machine.cudart.cudaGraphAddChildGraphNode(byref(c_void_p()), parent, last, 1, graph)
    exec_ = machine.instantiate(parent.value)
    machine.replay(exec_, stream)
    machine.replay(exec_, stream)
    machine.sync(stream)
    assert len(count) == 6
