"""What does one replayed step cost beside the C calls?

The loop of ``trlow.replay`` runs as it is, on rank threads, over a stub library whose functions
return at once: all that is left is Python, ctypes, the error check and waiting for the interpreter
lock. Thread CPU time per step and rank; wall time per step beside it. Run: python bench/replay.py
"""

from __future__ import annotations

import ctypes
import platform as machine
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from trlow.binding import cudart
from trlow.binding.clib import open_library
from trlow.ranks import Status
from trlow.replay import RUN_AHEAD, Launching, RankReplay

STUB = """
int cudaRuntimeGetVersion(int* v) { *v = 13000; return 0; }
int cudaGraphLaunch(void* g, void* s) { return 0; }
int cudaEventRecord(void* e, void* s) { return 0; }
int cudaEventSynchronize(void* e) { return 0; }
int cudaStreamWaitEvent(void* s, void* e, unsigned f) { return 0; }
"""
STEPS = 20_000
REPEATS = 7
RANKS = (1, 2, 4, 8, 64)


def stub_platform(folder: Path) -> SimpleNamespace:
    """A platform whose runtime does nothing, through the real bindings."""
    source, library = folder / "stub.c", folder / "libstub.so"
    source.write_text(STUB)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return SimpleNamespace(cudart=open_library(cudart.INTERFACE, str(library), "bench"), host=None)


def rank_replay(platform: SimpleNamespace, index: int, launches: int) -> RankReplay:
    """A prepared rank with ``launches`` graph launches a step (1 is fused)."""
    fused = launches == 1
    items = tuple(
        Launching(f"STAGE_{number}", 16, 32, () if fused else (48,), None if fused else 48)
        for number in range(launches)
    )
    rank = SimpleNamespace(index=index, platform=platform, status=Status())
    ends = tuple(((64, 16),) for _ in range(RUN_AHEAD))
    return RankReplay(rank, None, (items, items), ends)


def measure(replays: list[RankReplay], steps: int) -> tuple[float, float]:
    """(thread CPU us per step and rank, wall us per step)."""
    spent = [0.0] * len(replays)
    gate = threading.Barrier(len(replays) + 1, timeout=60)

    def work(number: int) -> None:
        gate.wait()
        begun = time.thread_time_ns()
        replays[number].run(steps, None, 0)
        spent[number] = (time.thread_time_ns() - begun) / 1e3 / steps

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(replays))]
    for thread in threads:
        thread.start()
    gate.wait()
    begun = time.perf_counter_ns()
    for thread in threads:
        thread.join()
    return statistics.median(spent), (time.perf_counter_ns() - begun) / 1e3 / steps


def main() -> None:
    """Print the table."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        machine.machine(),
    )
    print(f"{cpu}, Python {sys.version.split()[0]}, numpy {np.__version__}, {REPEATS} repeats")
    print("thread CPU us per step and rank beside the C calls: median (min..max); wall us per step")
    with tempfile.TemporaryDirectory() as folder:
        platform = stub_platform(Path(folder))
        for name, launches in (("fused", 1), ("staged, 12 stages", 12)):
            for ranks in RANKS:
                steps = max(STEPS // ranks // launches, 50)
                replays = [rank_replay(platform, index, launches) for index in range(ranks)]
                measure(replays, 50)
                runs = [measure(replays, steps) for _ in range(REPEATS)]
                used = [cpu_us for cpu_us, _ in runs]
                wall = statistics.median(wall_us for _, wall_us in runs)
                print(
                    f"{name:18} {ranks:3} ranks: {statistics.median(used):7.2f} "
                    f"({min(used):.2f}..{max(used):.2f})   wall {wall:9.2f}"
                )


if __name__ == "__main__":
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    main()
