"""How fast are the kernels of one rank, at the sizes of the digits model (batch 32)?

Each kernel is launched through the driver interface, LAUNCHES times before one wait, on the host
device (default) or on a GPU. Run: python bench/kernels.py [host|cuda]
"""

from __future__ import annotations

import platform as machine
import re
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_void_p
from pathlib import Path

from trlow.device import Platform, Streams
from trlow.kernel import Kernels, declarations
from trlow.settings import Settings

BATCH, REPEATS, LAUNCHES = 32, 15, 5
SLOT = (1 << 22) + 17 * 256  # bytes between two arrays; no power of two, so no common cache set
SLOTS = 16

CONVOLUTIONS = {  # height and width, cin, cout; 3 x 3 taps, stride 1, pad 1
    "conv 8x8   1 -> 16": (8, 1, 16),
    "conv 8x8  16 -> 32": (8, 16, 32),
    "conv 4x4  32 -> 64": (4, 32, 64),
}
COUNT = BATCH * 8 * 8 * 32  # elements of the largest feature
STREAMING = {  # kernel: (extents, work, bytes moved)
    "copy": ((4 * COUNT,), COUNT // 4, 8 * COUNT),
    "cast_f32_f16": ((COUNT,), COUNT, 6 * COUNT),
    "cast_f16_f32": ((COUNT,), COUNT, 6 * COUNT),
    "nan_check_f32": ((COUNT,), COUNT, 4 * COUNT),
    "momentum_weight": ((COUNT,), COUNT, 20 * COUNT),
    "bn_stats": ((BATCH * 64, 32), 32, 8 * COUNT),
    "bn_apply": ((BATCH * 64, 32), COUNT, 8 * COUNT),
    "bn_bwd_reduce": ((BATCH * 64, 32), 32, 8 * COUNT),
    "bn_bwd_data": ((BATCH * 64, 32), COUNT, 12 * COUNT),
    "relu_fwd": ((COUNT,), COUNT, 8 * COUNT),
    "maxpool_fwd": ((BATCH, 8, 8, 32, 4, 4, 2, 2), COUNT // 4, 5 * COUNT),
    "maxpool_bwd": ((BATCH, 8, 8, 32, 4, 4, 2, 2), COUNT, 9 * COUNT),
    "softmax_xent": ((BATCH, 10), 1, 8 * BATCH * 10),
}


def compiler(library: str | None) -> str:
    """The compiler that a library's .comment section names."""
    found = re.search(rb"GCC: \([^)]*\) [\d.]+", Path(library).read_bytes()) if library else None
    return found[0].decode() if found else "NVRTC"


def processor() -> str:
    """The processor's name from the kernel, or the machine's architecture."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else machine.machine()


def arguments(name: str, base: int, extents: tuple[int, ...]) -> list[int]:
    """One slot of memory for every pointer, then the extents: the declared order of all kernels."""
    pointers = len(declarations()[name].parameters) - len(extents)
    return [*(base + SLOT * index for index in range(pointers)), *extents]


def microseconds(launch: Callable[[], None], wait: Callable[[], None]) -> list[float]:
    """Time of one launch, REPEATS times."""
    launch()
    wait()
    samples = []
    for _ in range(REPEATS):
        begun = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            launch()
        wait()
        samples.append((time.perf_counter_ns() - begun) / 1e3 / LAUNCHES)
    return samples


def show(label: str, samples: list[float], amount: float, unit: str) -> None:
    """One line: median, extremes, and the amount (1e3 units per us is 1e9 a second) over time."""
    median = statistics.median(samples)
    spread = f"{min(samples):9.1f}..{max(samples):.1f}"
    print(f"{label:36} {median:9.1f} us {spread:24} {amount / median / 1e3:8.2f} {unit}")


def measure(kernels: Kernels, streams: Streams, base: int) -> None:
    """Print every kernel's line."""

    def sample(name: str, extents: tuple[int, ...], work: int) -> list[float]:
        kernels.load([name])
        values = arguments(name, base, extents)
        return microseconds(
            lambda: kernels.launch(name, values, work, streams[0]), streams.synchronize
        )

    sample("clear", (SLOT * SLOTS,), SLOT * SLOTS // 16)
    for label, (size, cin, cout) in CONVOLUTIONS.items():
        extents = (BATCH, size, size, cin, size, size, cout, 3, 3, 1, 1)
        pixels = BATCH * size * size
        works = {"fwd": pixels * cout, "bwd_data": pixels * cin, "bwd_weight": 9 * cin * cout}
        for part, work in works.items():
            times = sample(f"conv2d_{part}", extents, work)
            show(f"{label} {part}", times, 2 * pixels * 9 * cin * cout, "GFLOP/s")
    for name, (extents, work, nbytes) in STREAMING.items():
        show(name, sample(name, extents, work), nbytes, "GB/s")


def main() -> None:
    """Print the machine, then a line per kernel."""
    device = sys.argv[1] if len(sys.argv) > 1 else "host"
    platform = Platform.open(Settings(device=device))
    built_by = compiler(platform.host.path if platform.host else None)
    print(f"{processor()}, {device} device, {built_by}, {REPEATS} x {LAUNCHES} launches")
    print(f"{'kernel':36} {'median':>12} {'min..max':>14}")
    memory = c_void_p()
    streams = Streams(platform, [0])
    kernels = Kernels(platform, 0)
    platform.cudart.cudaMalloc(byref(memory), SLOT * SLOTS)
    try:
        measure(kernels, streams, memory.value or 0)
    finally:
        kernels.close()
        streams.close()
        platform.cudart.cudaFree(memory)


if __name__ == "__main__":
    main()
