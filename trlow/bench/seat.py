"""What one rank of a measurement owns: a stream, timed events, buffers with guards.

Made, used and closed on the rank's own thread, whose device stays current. No memory plan: a
measurement wants nothing but two buffers, of three kinds that NCCL treats differently.
"""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import byref, c_float, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trlow.bench.job import GUARD
from trlow.device import Pinned, Platform, Streams
from trlow.kernel import Kernels

if TYPE_CHECKING:
    from trlow.bench.exact import Array, Segment
    from trlow.bench.job import Job
    from trlow.binding.clib import Prepared

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
STAGING_NBYTES = 8 << 20
GUARD_BYTE = 0xA5
SCALE_KERNELS = {"float32": "scale_f32", "float16": "scale_f16", "bfloat16": "scale_bf16"}


@dataclass(slots=True, eq=False)  # an owner: itself alone
class Seat:
    """One rank. `bases` are allocations, data starts `GUARD` bytes behind."""

    rank: int
    device: int
    platform: Platform
    stream: int
    events: list[int]
    bases: dict[str, int]
    staging: Pinned
    kernels: Kernels
    factor: int = 0  # device address of 1/N in float32, where a mean needs it
    registrations: list[int] = field(default_factory=list)
    graphs: dict[object, tuple[int, int]] = field(default_factory=dict)  # graph, executable

    def data(self, name: str) -> int:
        """Address of a buffer's first element."""
        return self.bases[name] + GUARD

    def make_current(self) -> Prepared:
        """The call that makes this rank's device the issuing thread's."""
        return self.platform.cudart.prepare("cudaSetDevice", self.device)

    def record(self, index: int) -> Prepared:
        """The call that records an event, by index."""
        event = self.events[index]
        return self.platform.cudart.prepare("cudaEventRecord", event, self.stream)

    def launch(self, key: object) -> Prepared:
        """The call that launches a graph, by its key."""
        _, executable = self.graphs[key]
        return self.platform.cudart.prepare("cudaGraphLaunch", executable, self.stream)

    def elapsed_us(self, first: int, last: int) -> float:
        """Time between two events, by index."""
        taken = c_float()
        self.platform.cudart.cudaEventElapsedTime(
            byref(taken), self.events[first], self.events[last]
        )
        return taken.value * 1000.0

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        self.platform.cudart.cudaStreamSynchronize(self.stream)

    def copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        """Enqueue a copy."""
        if nbytes:
            self.platform.cudart.cudaMemcpyAsync(target, source, nbytes, kind, self.stream)

    def fill(self, address: int, segment: Segment) -> None:
        """Write a segment: its first period from the host, the rest by doubling on the device."""
        total = segment.count * segment.block.itemsize
        first = segment.part(0, min(segment.count, segment.block.size))
        self.upload(address, first)
        done = first.nbytes
        while done < total:
            part = min(done, total - done)
            self.copy(address + done, address, part, DEVICE_TO_DEVICE)
            done += part

    def upload(self, address: int, array: Array) -> None:
        """Copy an array to the device and wait."""
        flat = np.frombuffer(array.tobytes(), np.uint8)
        staged = np.frombuffer(self.staging.bytes, np.uint8)
        for start in range(0, flat.size, staged.size):
            part = flat[start : start + staged.size]
            staged[: part.size] = part
            self.copy(address + start, self.staging.address, part.size, HOST_TO_DEVICE)
            self.synchronize()

    def download(self, address: int, count: int, like: Array) -> Array:
        """At most `STAGING_NBYTES` of the device as an array of `like`'s type; waits.

        The array lies in the staging memory, so the next copy overwrites it.
        """
        self.copy(self.staging.address, address, count * like.itemsize, DEVICE_TO_HOST)
        self.synchronize()
        return np.frombuffer(self.staging.bytes, like.dtype, count)

    def set_guards(self, name: str, nbytes: int) -> None:
        """Write the canaries before and behind the first `nbytes` of a buffer."""
        for address in (self.bases[name], self.data(name) + nbytes):
            self.platform.cudart.cudaMemsetAsync(address, GUARD_BYTE, GUARD, self.stream)

    def guards(self, name: str, nbytes: int) -> list[tuple[int, int]]:
        """(byte offset from the data's start, value found) of the first harmed canary of each."""
        found = []
        for start in (-GUARD, nbytes):
            got = self.download(self.data(name) + start, GUARD, np.empty(0, np.uint8))
            harmed = np.flatnonzero(got != GUARD_BYTE)
            if harmed.size:
                found.append((start + int(harmed[0]), int(got[harmed[0]])))
        return found

    def drop_graphs(self) -> None:
        """Destroy every graph."""
        while self.graphs:
            _, (graph, executable) = self.graphs.popitem()
            self.platform.cudart.cudaGraphExecDestroy(executable)
            self.platform.cudart.cudaGraphDestroy(graph)


def open_seat(platform: Platform, job: Job, rank: int, device: int, stack: ExitStack) -> Seat:
    """Make one rank on its own thread; `stack` gets what closes it. Communicators are there."""
    cudart = platform.cudart
    cudart.cudaSetDevice(device)
    streams = Streams(platform, ("bench",))
    stack.callback(streams.close)
    events = _events(platform, job.units + 1, stack)
    bases = {name: _buffer(platform, job, stack) for name in job.buffers}
    staging = Pinned(platform, STAGING_NBYTES)
    stack.callback(staging.close)
    kernels = Kernels(platform, device)
    stack.callback(kernels.close)
    seat = Seat(rank, device, platform, streams["bench"], events, bases, staging, kernels)
    for base in bases.values():
        cudart.cudaMemsetAsync(base, 0, job.buffer_nbytes, seat.stream)
    seat.synchronize()
    return seat


def add_factor(seat: Seat, job: Job, ranks: int, stack: ExitStack) -> None:
    """1/N in device memory, and the kernel that multiplies by it warm, where a mean is asked."""
    pointer = c_void_p()
    seat.platform.cudart.cudaMalloc(byref(pointer), GUARD)
    seat.factor = pointer.value or 0
    stack.callback(seat.platform.cudart.cudaFree, seat.factor)
    seat.upload(seat.factor, np.array([1.0 / ranks], np.float32))
    if job.variant.mean == "sum_then_scale":
        name = SCALE_KERNELS[job.dtype]
        seat.kernels.load([name])
        seat.kernels.warm(name, seat.factor, seat.stream)
        seat.synchronize()


def _events(platform: Platform, count: int, stack: ExitStack) -> list[int]:
    found = []
    for _ in range(count):
        handle = c_void_p()
        platform.cudart.cudaEventCreateWithFlags(byref(handle), 0)
        stack.callback(platform.cudart.cudaEventDestroy, handle.value or 0)
        found.append(handle.value or 0)
    return found


def _buffer(platform: Platform, job: Job, stack: ExitStack) -> int:
    pointer = c_void_p()
    if job.variant.buffers == "plain":
        platform.cudart.cudaMalloc(byref(pointer), job.buffer_nbytes)
        stack.callback(platform.cudart.cudaFree, pointer.value or 0)
    else:
        platform.nccl.ncclMemAlloc(byref(pointer), job.buffer_nbytes)
        stack.callback(platform.nccl.ncclMemFree, pointer.value or 0)
    return pointer.value or 0
