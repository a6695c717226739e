"""What does one replayed step cost beside the C calls?

The loop of ``trlow.launching`` runs as it is, on rank threads, over a stub library, in two ways:

alone     The stub returns at once: all that is left is Python, ctypes, the error check and the
          fight for the interpreter's lock. Thread CPU time per step and rank, in which sleeping for
          the lock is not; wall time per step beside it.
together  The stub takes as long as a device: the ranks' waits end at one moment, give or take
          JITTER_NS, as on GPUs that sum together. Wall time per step and rank outside of C, as
          bench/step.py counts it: sleeping for the lock is in it, and beyond one rank is most of
          it. As waits spin, there are at most as many ranks as cores.

Run: python bench/replay.py
"""

from __future__ import annotations

import ctypes
import os
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
from trlow.launching import RUN_AHEAD, Launching, RankReplay
from trlow.ranks import Status

STEP_NS, LAUNCH_NS, CALL_NS, JITTER_NS = 200_000, 20_000, 1_500, 300
STUB = f"""
#define _POSIX_C_SOURCE 199309L
#include <time.h>
static __thread long begun, step, left, beside, most, *found, seed; /* not begun: return at once */
long stub_now(void) {{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}}
void stub_begin(long when, long steps, long* notes, long number) {{
    begun = when; most = steps; found = notes; seed = number; step = left = beside = 0;
}}
static long jitter(void) {{
    seed = (seed * 1103515245L + 12345) & 0x7fffffffL;
    return seed / 65536 % {JITTER_NS};
}}
static long enter(void) {{
    long now = stub_now();
    beside += left ? now - left : 0;
    return now;
}}
static int leave(long when) {{
    do left = stub_now(); while (left < when);
    return 0;
}}
int cudaRuntimeGetVersion(int* v) {{ *v = 13000; return 0; }}
int cudaGraphLaunch(void* g, void* s) {{
    return begun ? leave(enter() + {LAUNCH_NS} + jitter()) : 0;
}}
int cudaEventRecord(void* e, void* s) {{ return begun ? leave(enter() + {CALL_NS}) : 0; }}
int cudaStreamWaitEvent(void* s, void* e, unsigned f) {{
    return begun ? leave(enter() + {CALL_NS}) : 0;
}}
int cudaEventSynchronize(void* e) {{ /* once a step */
    if (!begun) return 0;
    enter();
    if (step < most) found[step] = beside;
    beside = 0;
    return leave(begun + ++step * {STEP_NS} + jitter());
}}
"""
STEPS = 20_000
TOGETHER_STEPS, SKIPPED = 2_000, 20
REPEATS = 7
RANKS = (1, 2, 4, 8, 64)


def stub_platform(folder: Path) -> SimpleNamespace:
    """A platform whose runtime does nothing, through the real bindings."""
    source, library = folder / "stub.c", folder / "libstub.so"
    source.write_text(STUB)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    stub = ctypes.CDLL(str(library))
    stub.stub_now.restype = ctypes.c_long
    stub.stub_begin.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
    return SimpleNamespace(
        cudart=open_library(cudart.INTERFACE, str(library), "bench"), host=None, stub=stub
    )


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


def together(platform: SimpleNamespace, replays: list[RankReplay]) -> list[float]:
    """Wall us outside of C of every step and rank, where the ranks' waits end together."""
    found = np.zeros((len(replays), TOGETHER_STEPS), np.int64)
    begun = platform.stub.stub_now() + 20_000_000

    def work(number: int) -> None:
        platform.stub.stub_begin(begun, TOGETHER_STEPS, found[number].ctypes.data, number + 1)
        replays[number].run(TOGETHER_STEPS + RUN_AHEAD, None, 0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(replays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (found[:, SKIPPED:].ravel() / 1e3).tolist()


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
    print("alone: thread CPU us per step and rank: median (min..max); wall us per step")
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
        print("together: wall us per step and rank outside of C; range of medians")
        for ranks in (number for number in RANKS if number <= (os.cpu_count() or 1)):
            replays = [rank_replay(platform, index, 1) for index in range(ranks)]
            rounds = [together(platform, replays) for _ in range(REPEATS)]
            median, late = np.percentile(np.concatenate(rounds), (50, 99))
            each = [statistics.median(one) for one in rounds]
            print(
                f"fused              {ranks:3} ranks: median {median:.2f} "
                f"({min(each):.2f}..{max(each):.2f})   p99 {late:.2f}"
            )


if __name__ == "__main__":
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    main()
