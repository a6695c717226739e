"""Launch every declared kernel at odd counts and offsets, and compare with the host device.

    PYTHONPATH=.:tests python tests/gpu/every_kernel.py [--device cuda|host] [--only NAME] [--exact]

Elementwise kernels must give the host device's bytes, reductions agree within TOLERANCE. Every
array is an allocation of its own, with canaries before and behind; with --exact it ends where the
array ends, so that compute-sanitizer's memcheck sees what is read or written behind. On "host" a
kernel runs as blocks of fibers and is compared with the same as one thread. --plant makes a mistake
on purpose, which the sanitizer has to find.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_char_p, c_int, c_void_p
from dataclasses import dataclass

import numpy as np
from kernel_cases import CLOCKS, REDUCTIONS, Case, cases

from trlow import kernel
from trlow.binding import nvrtc
from trlow.device import Platform, Streams
from trlow.kernel import Kernels, declarations
from trlow.settings import Settings

CANARY = 0xA5
TAIL = 64  # bytes of canary behind an array
TO_DEVICE, FROM_DEVICE = 1, 2  # cudaMemcpyKind
SERIAL, FIBERS = 0, 1  # how the host device runs a kernel
TOLERANCE = 1e-5  # of the largest magnitude: fp32 sums of some hundred terms, in another order


@dataclass
class Bench:
    """One device with its kernels. Used by the thread that opened it."""

    platform: Platform
    kernels: Kernels
    stream: int
    mode: int | None = None  # of the host device
    tail: int = TAIL

    def run(self, case: Case, extra: int = 0) -> list[np.ndarray]:
        """All arrays after the launch. AssertionError if a byte around an array has changed."""
        self.kernels.load([case.kernel])
        if self.mode is not None and self.platform.host is not None:
            self.platform.host.trlowHostKernelMode(self.mode)
        arguments = case.arguments()
        with ExitStack() as stack:
            values: list[int] = []
            placed: list[tuple[int, int, np.ndarray]] = []
            for index, argument in enumerate(arguments):
                if isinstance(argument, int):
                    values.append(argument + extra)
                    continue
                lead = case.shift * (index + 1) % 17 * argument.itemsize
                whole = np.full(lead + argument.nbytes + self.tail, CANARY, np.uint8)
                base = stack.enter_context(self.allocated(whole.nbytes))
                self.copy(base, whole, TO_DEVICE)
                self.copy(base + lead, argument, TO_DEVICE)
                values.append(base + lead)
                placed.append((base, lead, argument))
            self.kernels.launch(case.kernel, values, case.work, self.stream)
            for base, lead, argument in placed:
                whole = np.zeros(lead + argument.nbytes + self.tail, np.uint8)
                self.copy(base, whole, FROM_DEVICE)
                around = np.delete(whole, slice(lead, lead + argument.nbytes))
                assert (around == CANARY).all(), f"{case.kernel} wrote beside an array: {case}"
                argument[...] = whole[lead:][: argument.nbytes].view(argument.dtype)
            return [argument for _, _, argument in placed]

    @contextmanager
    def allocated(self, nbytes: int) -> Iterator[int]:
        pointer = c_void_p()
        self.platform.cudart.cudaMalloc(byref(pointer), nbytes)
        try:
            yield pointer.value or 0
        finally:
            self.platform.cudart.cudaFree(pointer)

    def copy(self, device: int, array: np.ndarray, kind: int) -> None:
        if array.nbytes:
            both = (device, array.ctypes.data) if kind == TO_DEVICE else (array.ctypes.data, device)
            self.platform.cudart.cudaMemcpyAsync(*both, array.nbytes, kind, self.stream)
        self.platform.cudart.cudaStreamSynchronize(self.stream)


@contextmanager
def bench(device: str, mode: int | None = None) -> Iterator[Bench]:
    """The first device of a platform."""
    platform = Platform.open(Settings(device=device))
    with ExitStack() as stack:
        platform.cudart.cudaSetDevice(0)
        streams = Streams(platform, ["kernel"])
        stack.callback(streams.close)
        kernels = Kernels(platform, 0)
        stack.callback(kernels.close)
        if platform.host is not None:
            stack.callback(platform.host.trlowHostKernelMode, SERIAL)
        yield Bench(platform, kernels, streams["kernel"], mode)


@contextmanager
def benches(device: str, tail: int = TAIL) -> Iterator[tuple[Bench, Bench]]:
    """What is tested, and what it is compared with."""
    with bench(device, FIBERS) as tested, bench("host", SERIAL) as reference:
        tested.tail = tail
        yield tested, reference


def compare(tested: Bench, reference: Bench, case: Case) -> float:
    """The largest difference relative to the largest magnitude; 0.0 where all bytes agree.

    AssertionError where it is more than the kernel's kind allows.
    """
    worst = 0.0
    names = [name for t, name in declarations()[case.kernel].parameters if "*" in t]
    found, expected = tested.run(case), reference.run(case)
    if case.kernel in CLOCKS:
        return worst
    for name, ours, theirs in zip(names, found, expected, strict=True):
        if ours.tobytes() == theirs.tobytes():
            continue
        text = f"{case.kernel}: {name} differs from the host device's at {case}"
        assert case.kernel in REDUCTIONS, text
        assert ours.dtype == np.float32, text
        most = float(np.abs(theirs).max()) or 1.0
        difference = float(np.abs(ours - theirs).max()) / most
        assert difference <= TOLERANCE, f"{text}: {difference:.1e}"  # NaN is no smaller number
        worst = max(worst, difference)
    return worst


RACE = b"""extern "C" __global__ void race(int* x) {
  __shared__ int lane[256];
  lane[threadIdx.x] = threadIdx.x;
  x[threadIdx.x] = lane[255 - threadIdx.x];
}"""


def plant(what: str, tested: Bench) -> None:
    """A mistake that compute-sanitizer has to find."""
    if what == "overrun":
        tested.run(Case("clear", {"nbytes": 1003}, 0, 1003), extra=1)
        return
    driver, get = tested.platform.driver, tested.platform.cudart.cudaDeviceGetAttribute
    major, minor, module, function = c_int(), c_int(), c_void_p(), c_void_p()
    get(byref(major), kernel.COMPUTE_CAPABILITY_MAJOR, 0)
    get(byref(minor), kernel.COMPUTE_CAPABILITY_MINOR, 0)
    option = f"--gpu-architecture=sm_{major.value}{minor.value}"
    image = nvrtc.compile_image(RACE, "race.cu", {}, [option], "cubin")
    driver.cuModuleLoadData(byref(module), c_char_p(image))
    driver.cuModuleGetFunction(byref(function), module, b"race")
    with tested.allocated(4 * 256) as address:
        storage, pointers = kernel._pack([address])
        driver.cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, tested.stream, pointers, None)
        tested.platform.cudart.cudaStreamSynchronize(tested.stream)
        del storage
    driver.cuModuleUnload(module)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--only", metavar="NAME", help="one kernel")
    parser.add_argument("--exact", action="store_true", help="no canary behind an array")
    parser.add_argument("--plant", choices=("overrun", "race"), help="make this mistake instead")
    given = parser.parse_args()
    if given.plant:
        with bench(given.device) as tested:
            tested.tail = 0
            plant(given.plant, tested)
        return 0
    failures = 0
    with benches(given.device, 0 if given.exact else TAIL) as (tested, reference):
        for name in [given.only] if given.only else sorted(declarations()):
            try:
                made = cases(name)
                worst = max(compare(tested, reference, case) for case in made)
            except AssertionError as error:
                failures += 1
                print(f"FAILED {error}")
                continue
            agreement = f"within {worst:.1e}" if worst else "same bytes"
            print(f"{name}: {len(made)} launches, {agreement}")
    print(f"{failures} kernels failed" if failures else "every kernel agrees")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
