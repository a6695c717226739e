"""A machine of four host devices for each test, and the proof that the test left nothing behind."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_size_t, c_void_p

import numpy as np
import pytest

from trlow.binding import host
from trlow.errors import ForeignError

KINDS = (
    *("captures", "execs", "graphs", "comms", "events", "streams", "modules"),
    *("allocations", "pinned"),
)


class Machine:
    """Four host devices. What is made through it is given back when the test ends."""

    def __init__(self, libraries: host.HostLibraries) -> None:
        self.cudart = libraries.cudart
        self.driver = libraries.driver
        self.nccl = libraries.nccl
        self.host = libraries.host
        self._undo: list[tuple[Callable[..., int], int]] = []
        self._functions: dict[tuple[int, str], int] = {}

    def configure(self, devices=4, workers=0, seed=0, device_nbytes=0):
        self.host.trlowHostConfigure(devices, workers, seed, device_nbytes)

    def code(self, function, *arguments) -> int:
        """The call's result code, whatever it is."""
        try:
            return function(*arguments)
        except ForeignError as error:
            return error.code

    def report(self) -> str:
        """What the device says of the last failure."""
        return self.nccl.ncclGetLastError(None).decode()

    def live(self, what: str) -> int:
        return self.host.trlowHostLive(what.encode())

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before = c_int()
        self.cudart.cudaGetDevice(byref(before))
        self.cudart.cudaSetDevice(device)
        try:
            yield
        finally:
            self.cudart.cudaSetDevice(before.value)

    # ---- making things ---------------------------------------------------------------------
    def _made(self, undo, handle: int) -> int:
        self._undo.append((undo, handle))
        return handle

    def forget(self, handle: int) -> None:
        """The test itself gave this back."""
        self._undo = [entry for entry in self._undo if entry[1] != handle]

    def malloc(self, nbytes: int, device: int = 0) -> int:
        pointer = c_void_p()
        with self.on(device):
            self.cudart.cudaMalloc(byref(pointer), nbytes)
        return self._made(self.cudart.cudaFree, pointer.value)

    def array(self, values, dtype, device: int = 0):
        """(address, numpy view) of device memory that holds `values`."""
        source = np.asarray(values, dtype)
        address = self.malloc(max(source.nbytes, 1), device)
        view = self.view(address, source.size, dtype)
        view[:] = source
        return address, view

    @staticmethod
    def view(address: int, count: int, dtype):
        nbytes = count * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)

    def stream(self, device: int = 0) -> int:
        handle = c_void_p()
        with self.on(device):
            self.cudart.cudaStreamCreateWithFlags(byref(handle), 1)
        return self._made(self.cudart.cudaStreamDestroy, handle.value)

    def event(self, device: int = 0, flags: int = 2) -> int:
        handle = c_void_p()
        with self.on(device):
            self.cudart.cudaEventCreateWithFlags(byref(handle), flags)
        return self._made(self.cudart.cudaEventDestroy, handle.value)

    def comms(self, ranks: int = 4) -> list[int]:
        handles = (c_void_p * ranks)()
        self.nccl.ncclCommInitAll(handles, ranks, None)
        return [self._made(self.nccl.ncclCommDestroy, handle) for handle in handles]

    def end_capture(self, stream: int) -> int:
        graph = c_void_p()
        self.cudart.cudaStreamEndCapture(stream, byref(graph))
        return self._made(self.cudart.cudaGraphDestroy, graph.value)

    def instantiate(self, graph: int) -> int:
        handle = c_void_p()
        self.cudart.cudaGraphInstantiate(byref(handle), graph, 0)
        return self._made(self.cudart.cudaGraphExecDestroy, handle.value)

    def nodes(self, graph: int) -> list[int]:
        """The types of the graph's nodes."""
        count = c_size_t()
        self.cudart.cudaGraphGetNodes(graph, None, byref(count))
        handles = (c_void_p * count.value)()
        self.cudart.cudaGraphGetNodes(graph, handles, byref(count))
        types = []
        for handle in handles:
            kind = c_int()
            self.cudart.cudaGraphNodeGetType(handle, byref(kind))
            types.append(kind.value)
        return types

    # ---- doing things ----------------------------------------------------------------------
    def function(self, name: str, device: int = 0, mode: int = 0) -> int:
        key = (device * 2 + mode, name)
        if key not in self._functions:
            module, function = c_void_p(), c_void_p()
            self.host.trlowHostKernelMode(mode)
            with self.on(device):
                self.driver.cuModuleLoadData(byref(module), b"trlow-host-kernels")
            self._made(self.driver.cuModuleUnload, module.value)
            self.driver.cuModuleGetFunction(byref(function), module, name.encode())
            self._functions[key] = function.value
        return self._functions[key]

    def launch(self, stream, name, *arguments, device=0, mode=0, grid=1, block=32) -> None:
        """Launch a kernel; every argument is an address or an int, 8 bytes each."""
        words = [ctypes.c_longlong(value) for value in arguments]
        pointers = (c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        function = self.function(name, device, mode)
        with self.on(device):
            self.driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, pointers, None)

    def scale(self, stream: int, address: int, factor: int, count: int, device: int = 0) -> None:
        self.launch(stream, "scale_f32", address, factor, count, device=device)

    def replay(self, exec_: int, stream: int, device: int = 0) -> None:
        with self.on(device):
            self.cudart.cudaGraphLaunch(exec_, stream)

    def sync(self, *streams: int) -> None:
        for stream in streams:
            self.cudart.cudaStreamSynchronize(stream)

    def elapsed(self, start: int, end: int) -> float:
        milliseconds = c_float()
        self.cudart.cudaEventElapsedTime(byref(milliseconds), start, end)
        return milliseconds.value

    def all_reduce(self, rank, address, count, comms, streams, dtype=7, op=0) -> int:
        return self.nccl.ncclAllReduce(
            address, address, count, dtype, op, comms[rank], streams[rank]
        )

    # ---- the end ---------------------------------------------------------------------------
    def close(self) -> None:
        """Give back in the order that the rules want: graphs, communicators, the rest."""
        self.host.trlowHostFail(b"*", 0, 0)
        order = [
            self.cudart.cudaGraphExecDestroy,
            self.cudart.cudaGraphDestroy,
            self.nccl.ncclCommDestroy,
        ]
        undo, self._undo = self._undo, []
        for function, handle in undo:  # a test that failed may have left captures open
            status = c_int()
            if function is self.cudart.cudaStreamDestroy:
                self.code(self.cudart.cudaStreamIsCapturing, handle, byref(status))
            if status.value:
                self.code(self.cudart.cudaStreamEndCapture, handle, byref(c_void_p()))
        for first in order:
            for function, handle in undo:
                if function is first:
                    function(handle)
        for function, handle in reversed(undo):
            if function not in order:
                function(handle)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> host.HostLibraries:
    """A copy of the library, so that these tests share no device with any other test."""
    copy = tmp_path_factory.mktemp("host_device") / "libtrlow_host.so"
    shutil.copy(host.DEFAULT_PATH, copy)
    return host.load(str(copy))


@pytest.fixture
def machine(libraries) -> Iterator[Machine]:
    made = Machine(libraries)
    made.host.trlowHostProgressTimeout(5000)
    made.configure()
    made.cudart.cudaSetDevice(0)
    before = {kind: made.live(kind) for kind in KINDS}
    yield made
    made.close()
    made.host.trlowHostProgressTimeout(30000)
    made.host.trlowHostKernelMode(0)
    made.configure()
    assert {kind: made.live(kind) for kind in KINDS} == before
