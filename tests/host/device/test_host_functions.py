"""Host functions: Python that a stream or a graph runs when its turn comes."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from ctypes import byref, c_int, c_size_t, c_void_p

import numpy as np
import pytest

from trlow.binding.cudart import cudaHostFn_t

pytestmark = pytest.mark.timeout(60)

THREAD_LOCAL = 1
MEMSET, HOST, GRAPH = 2, 3, 4
INVALID_VALUE, INVALID_HANDLE, TIMEOUT, NOT_PERMITTED = 1, 400, 702, 800


def enqueue(machine, stream, function, data=None):
    machine.cudart.cudaLaunchHostFunc(stream, function, data)


def test_it_sees_what_the_stream_did_before_and_nothing_of_what_follows(machine):
    stream = machine.stream()
    address, view = machine.array([0], np.uint8)
    seen = []
    look = cudaHostFn_t(lambda _: seen.append(int(view[0])))
    for value in range(1, 101):
        machine.cudart.cudaMemsetAsync(address, value, 1, stream)
        enqueue(machine, stream, look)
    machine.sync(stream)
    assert seen == list(range(1, 101))


def test_it_gets_its_own_64_bit_argument(machine):
    stream, seen = machine.stream(), []
    function = cudaHostFn_t(seen.append)
    enqueue(machine, stream, function, 0xFEDCBA9876543210)
    enqueue(machine, stream, function, None)
    machine.sync(stream)
    assert seen == [0xFEDCBA9876543210, None]


def test_captured_it_is_a_node_that_runs_in_every_launch(machine):
    stream, seen = machine.stream(), []
    address, view = machine.array([0], np.uint8)

    def add(_):
        view[0] += 1
        seen.append(int(view[0]))

    function = cudaHostFn_t(add)
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    enqueue(machine, stream, function)
    machine.cudart.cudaMemsetAsync(address, 7, 1, stream)
    enqueue(machine, stream, function)
    graph = machine.end_capture(stream)
    machine.sync(stream)
    assert seen == []
    assert machine.nodes(graph) == [HOST, MEMSET, HOST]
    exec_ = machine.instantiate(graph)
    calls = machine.host.trlowHostCalls(b"cudaLaunchHostFunc")
    for _ in range(3):
        machine.replay(exec_, stream)
    machine.sync(stream)
    assert seen == [1, 8, 9, 8, 9, 8]
    assert machine.host.trlowHostCalls(b"cudaLaunchHostFunc") == calls


@pytest.mark.parametrize("seed", [0, *range(1, 9)])
def test_it_forks_and_joins_like_any_other_node(machine, seed):
    machine.configure(seed=seed)
    origin, side = machine.stream(), machine.stream()
    forked, joined = machine.event(), machine.event()
    address, view = machine.array(np.zeros(2), np.uint8)
    seen = []
    before, beside, after = (
        cudaHostFn_t(lambda _, name=name: seen.append((name, *view.tolist())))
        for name in ("before", "beside", "after")
    )
    machine.cudart.cudaStreamBeginCapture(origin, THREAD_LOCAL)
    enqueue(machine, origin, before)
    machine.cudart.cudaEventRecord(forked, origin)
    machine.cudart.cudaStreamWaitEvent(side, forked, 0)
    enqueue(machine, side, beside)
    machine.cudart.cudaMemsetAsync(address + 1, 2, 1, side)
    machine.cudart.cudaMemsetAsync(address, 1, 1, origin)
    machine.cudart.cudaEventRecord(joined, side)
    machine.cudart.cudaStreamWaitEvent(origin, joined, 0)
    enqueue(machine, origin, after)
    exec_ = machine.instantiate(machine.end_capture(origin))
    for _ in range(20):
        seen.clear()
        view[:] = 0
        machine.replay(exec_, origin)
        machine.sync(origin)
        assert [name for name, *_ in seen] == ["before", "beside", "after"]
        assert (seen[0], seen[2]) == (("before", 0, 0), ("after", 1, 2))
        assert seen[1][2] == 0  # what stands beside it may have run, what stands behind it not


def test_it_runs_in_a_child_graph_between_what_surrounds_the_child(machine):
    stream, seen = machine.stream(), []
    address, view = machine.array([0], np.uint8)
    look = cudaHostFn_t(lambda _: seen.append(int(view[0])))
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    machine.cudart.cudaMemsetAsync(address, 1, 1, stream)
    enqueue(machine, stream, look)
    machine.cudart.cudaMemsetAsync(address, 2, 1, stream)
    child = machine.end_capture(stream)
    parent = c_void_p()
    machine.cudart.cudaGraphCreate(byref(parent), 0)
    machine._made(machine.cudart.cudaGraphDestroy, parent.value)
    last = (c_void_p * 1)()
    for number in range(2):
        after = (c_void_p * 1)(last[0])
        machine.cudart.cudaGraphAddChildGraphNode(last, parent, after, number, child)
    assert machine.nodes(parent.value) == [GRAPH, GRAPH]
    exec_ = machine.instantiate(parent.value)
    for _ in range(3):
        machine.replay(exec_, stream)
    machine.sync(stream)
    assert seen == [1] * 6
    assert view[0] == 2


def test_ranks_on_threads_of_their_own_mix_them_with_collectives(machine):
    """Every rank's function adds 1 before each all-reduce; no worker holds a lock meanwhile."""
    ranks, steps = 4, 50
    comms = machine.comms(ranks)
    streams = [machine.stream(rank) for rank in range(ranks)]
    arrays = [machine.array([0.0], np.float32, rank) for rank in range(ranks)]
    reduced = [[] for _ in range(ranks)]
    threads_of = [set() for _ in range(ranks)]
    failures = []

    def functions_of(rank):
        view = arrays[rank][1]

        def fill(_):
            threads_of[rank].add(threading.get_ident())
            view[0] = len(reduced[rank]) + 1

        return cudaHostFn_t(fill), cudaHostFn_t(lambda _: reduced[rank].append(float(view[0])))

    functions = [functions_of(rank) for rank in range(ranks)]
    begun = threading.Barrier(ranks, timeout=20)

    def work(rank):
        try:
            stream, (fill, look) = streams[rank], functions[rank]
            machine.cudart.cudaSetDevice(rank)
            machine.host.trlowHostIssuerEnter()
            machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
            enqueue(machine, stream, fill)
            machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
            enqueue(machine, stream, look)
            exec_ = machine.instantiate(machine.end_capture(stream))
            begun.wait()
            for _ in range(steps):
                machine.cudart.cudaGraphLaunch(exec_, stream)
            machine.sync(stream)
            machine.host.trlowHostIssuerLeave()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures
    assert reduced == [[4.0 * (step + 1) for step in range(steps)]] * ranks
    callers = {thread.ident for thread in threads}
    assert not set.union(*threads_of) & callers


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_thread_that_takes_and_leaves_the_interpreter_lock_hinders_nobody(machine, workers):
    machine.configure(workers=workers)
    streams = [machine.stream(device) for device in (0, 1)]
    count = []
    function = cudaHostFn_t(lambda _: count.append(sum(range(50))))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for step in range(300):
            for stream in streams:
                enqueue(machine, stream, function)
            sum(range(2000))  # holds the lock
            if step % 10 == 0:
                time.sleep(0)  # leaves it
            machine.cudart.cudaStreamQuery(streams[step % 2])  # leaves it inside the library
        machine.sync(*streams)
    finally:
        sys.setswitchinterval(interval)
    assert len(count) == 600


def test_no_lock_of_the_library_is_held_while_one_runs(machine):
    machine.configure(workers=2)
    stream, other = machine.stream(), machine.stream(1)
    address, view = machine.array([0], np.uint8, 1)
    started, release = threading.Event(), threading.Event()

    def run(_):
        started.set()
        release.wait(20)

    function = cudaHostFn_t(run)
    enqueue(machine, stream, function)
    assert started.wait(20)
    machine.cudart.cudaMemsetAsync(address, 3, 1, other)
    machine.sync(other)
    assert view[0] == 3
    assert machine.cudart.cudaStreamQuery(stream) == 600
    release.set()
    machine.sync(stream)


def test_null_and_handles_of_nothing_are_refused_and_a_capture_goes_on(machine):
    launch, stream = machine.cudart.cudaLaunchHostFunc, machine.stream()
    function = cudaHostFn_t(lambda _: None)
    assert machine.code(launch, stream, cudaHostFn_t(), None) == INVALID_VALUE
    assert machine.code(launch, 0xDEAD0, function, None) == INVALID_HANDLE
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    assert machine.code(launch, stream, cudaHostFn_t(), None) == INVALID_VALUE
    enqueue(machine, stream, function)
    assert machine.nodes(machine.end_capture(stream)) == [HOST]
    with pytest.raises(ctypes.ArgumentError):
        launch(stream, lambda _: None, None)


def test_calls_inside_one_are_not_permitted_and_change_nothing(machine):
    stream = machine.stream()
    address, view = machine.array([5], np.uint8)
    comms = machine.comms(2)
    codes = []

    def run(_):
        free, total = c_size_t(), c_size_t()
        for call, *arguments in (
            (machine.cudart.cudaMemsetAsync, address, 9, 1, stream),
            (machine.cudart.cudaStreamSynchronize, stream),
            (machine.cudart.cudaDeviceSynchronize,),
            (machine.cudart.cudaMalloc, byref(c_void_p()), 8),
            (machine.cudart.cudaMemGetInfo, byref(free), byref(total)),
            (machine.cudart.cudaGetDevice, byref(c_int())),
            (machine.cudart.cudaLaunchHostFunc, stream, function, None),
            (machine.driver.cuInit, 0),
        ):
            codes.append(machine.code(call, *arguments))
        reduce = (address, address, 1, 1, 0, comms[0], stream)
        codes.append(machine.code(machine.nccl.ncclAllReduce, *reduce) != 0)

    function = cudaHostFn_t(run)
    enqueue(machine, stream, function)
    machine.sync(stream)
    assert codes == [NOT_PERMITTED] * 8 + [True]
    assert view[0] == 5
    # the worker that ran it is a worker as before
    machine.cudart.cudaMemsetAsync(address, 9, 1, stream)
    machine.sync(stream)
    assert view[0] == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_is_told_to_the_interpreter_and_the_stream_goes_on(machine, monkeypatch):
    stream, told, seen = machine.stream(), [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: told.append(event.exc_type))

    def run(_):
        raise KeyError("of the test")

    function, look = cudaHostFn_t(run), cudaHostFn_t(lambda _: seen.append(1))
    enqueue(machine, stream, function)
    enqueue(machine, stream, look)
    machine.sync(stream)
    assert (told, seen) == ([KeyError], [1])


def waits_for_a_slow_one(machine, rank_of_the_function, as_issuer):
    """Two ranks all-reduce, one of them behind a slow function: the codes of their waits."""
    machine.host.trlowHostProgressTimeout(50)
    comms = machine.comms(2)
    streams = [machine.stream(rank) for rank in range(2)]
    arrays = [machine.array([1.0], np.float32, rank) for rank in range(2)]
    slow = cudaHostFn_t(lambda _: time.sleep(0.5))
    enqueue(machine, streams[rank_of_the_function], slow)
    for rank in range(2):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
    codes = {}

    def wait(rank):
        if as_issuer:
            machine.host.trlowHostIssuerEnter()
        codes[rank] = machine.code(machine.cudart.cudaStreamSynchronize, streams[rank])
        if as_issuer:
            machine.host.trlowHostIssuerLeave()

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    errors = []
    for comm in comms:
        value = c_int()
        machine.nccl.ncclCommGetAsyncError(comm, byref(value))
        errors.append(value.value)
    return codes, errors, [float(view[0]) for _, view in arrays]


@pytest.mark.parametrize("as_issuer", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_is_called_missing_while_a_slow_one_runs(machine, rank, as_issuer):
    codes, errors, values = waits_for_a_slow_one(machine, rank, as_issuer)
    assert (codes, errors, values) == ({0: 0, 1: 0}, [0, 0], [2.0, 2.0])


def test_a_rank_that_is_missing_is_told_once_the_slow_one_has_ended(machine):
    machine.host.trlowHostProgressTimeout(50)
    comms = machine.comms(2)
    streams = [machine.stream(rank) for rank in range(2)]
    address, _ = machine.array([1.0], np.float32)
    slow = cudaHostFn_t(lambda _: time.sleep(0.3))
    enqueue(machine, streams[1], slow)
    start = time.monotonic()
    machine.nccl.ncclAllReduce(address, address, 1, 7, 0, comms[0], streams[0])
    assert machine.code(machine.cudart.cudaStreamSynchronize, streams[0]) == TIMEOUT
    assert 0.25 < time.monotonic() - start < 5
    assert "missing: rank 1 (device 1), which has not issued it" in machine.report()
    for comm in comms:
        machine.nccl.ncclCommAbort(comm)
        machine.forget(comm)
    machine.sync(*streams)
