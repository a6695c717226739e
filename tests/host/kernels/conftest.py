"""Launches kernels of the host device on numpy arrays, through the driver's interface."""

from __future__ import annotations

from ctypes import addressof, byref, c_char_p, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from trlow.binding import host
from trlow.kernel import HOST_IMAGE, declarations

CANARY = 0xA5
NON_BLOCKING = 1
SERIAL, FIBERS = 0, 1


@dataclass(frozen=True)
class Mode:
    """How the host device runs a kernel: as one thread, or as blocks of fibers."""

    kernel_mode: int
    grid: int = 1
    block: int = 256

    def __str__(self):
        return f"fibers_{self.grid}x{self.block}" if self.kernel_mode else "serial"


MODES = (Mode(SERIAL), Mode(FIBERS, 1, 1), Mode(FIBERS, 3, 32), Mode(FIBERS, 2, 256))


class Launcher:
    """One stream of the host device; `launch` runs one kernel to its end."""

    def __init__(self, libraries):
        self.libraries = libraries
        self.stream = c_void_p()
        libraries.cudart.cudaSetDevice(0)
        libraries.cudart.cudaStreamCreateWithFlags(byref(self.stream), NON_BLOCKING)

    def launch(self, mode, name, *arguments):
        """Arguments are arrays (their address is passed) and integers, as declared."""
        driver = self.libraries.driver
        assert len(arguments) == len(declarations()[name].parameters), name
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        storage = (c_uint64 * len(values))(*values)
        pointers = (c_void_p * len(values))(
            *(addressof(storage) + 8 * i for i in range(len(values)))
        )
        module, function = c_void_p(), c_void_p()
        self.libraries.host.trlowHostKernelMode(mode.kernel_mode)
        driver.cuModuleLoadData(byref(module), c_char_p(HOST_IMAGE))
        try:
            driver.cuModuleGetFunction(byref(function), module, name.encode())
            driver.cuLaunchKernel(
                function, mode.grid, 1, 1, mode.block, 1, 1, 0, self.stream, pointers, None
            )
            self.libraries.cudart.cudaStreamSynchronize(self.stream)
        finally:
            self.libraries.host.trlowHostKernelMode(SERIAL)
            driver.cuModuleUnload(module)

    def close(self):
        self.libraries.cudart.cudaStreamDestroy(self.stream)


class Guarded:
    """An array at an element offset from a 64-byte boundary, between canaries."""

    def __init__(self, values, offset=0):
        values = np.asarray(values)
        edge = 64 + offset * values.itemsize
        self.raw = np.full(64 + edge + values.nbytes + 64, CANARY, np.uint8)
        start = -self.raw.ctypes.data % 64 + edge
        self.inside = slice(start, start + values.nbytes)
        self.array = self.raw[self.inside].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    def intact(self):
        """Whether every byte outside the array still is the canary."""
        outside = np.delete(self.raw, self.inside)
        return bool((outside == CANARY).all())


@pytest.fixture(scope="module")  # its stream must not outlive the kernels' tests
def launcher():
    launcher = Launcher(host.load())
    yield launcher
    launcher.close()


@pytest.fixture(params=MODES, ids=str)
def mode(request):
    return request.param


@pytest.fixture
def run(launcher, mode):
    """`run(name, *arguments)` in the mode of the test."""

    def run(name, *arguments):
        launcher.launch(mode, name, *arguments)

    return run


@pytest.fixture
def run_each(launcher):
    """`run_each(name, make)`: the arrays that make() returned, after a run in each of the modes."""

    def run_each(name, make):
        for each in MODES:
            arguments = make()
            launcher.launch(each, name, *arguments)
            yield each, [a for a in arguments if isinstance(a, np.ndarray)]

    return run_each


@pytest.fixture
def guarded():
    return Guarded


@pytest.fixture
def rng():
    return np.random.default_rng(7)
