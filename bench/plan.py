"""How long does planning take for 10,000 and 100,000 DTensors, and how long a program's order?

    python bench/plan.py [--repeat N] [--json FILE]

Planning is `add` and `build` with two variants for each tensor. Fingerprint, JSON and lookup are
shown apart; so is the order of a program of 400 and of 4,000 stages. Medians of wall time, with the
fastest and the slowest of the repeats, and the median of CPU time, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from trlow.dtype import U8
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import Program, Stage, Stream
from trlow.range_op import Launch, RangeOp
from trlow.region import CNN_TABLE


def built(count: int) -> MemoryPlan:
    builder = PlanBuilder(CNN_TABLE)
    names = [region.name for region in CNN_TABLE]
    for k in range(count):
        batch = k % 7 + 1
        builder.add(
            names[k % len(names)],
            f"tensor.{k}",
            (batch, 3, 5),
            variants={"short": (1, 3, 5), "validation": (2 * batch, 3, 5)},
        )
    return builder.build()


def looked_up(plan: MemoryPlan, count: int) -> int:
    return sum(plan[f"tensor.{k}"].offset for k in range(count))


def stages(count: int) -> tuple[Stage, ...]:
    """Each reads what the one before it wrote and writes for the next; five streams in turn."""

    def touched(k: int) -> Range:
        return Range(64 * k, 64, U8, f"r{k}", f"r{k}")

    streams = list(Stream)
    return tuple(
        Stage(
            f"S{k}",
            streams[k % 5],
            (RangeOp("bench", (touched(k),), (touched(k + 1),), (Launch("bench", (), 1),)),),
        )
        for k in range(count)
    )


def measure(repeat: int, act: Callable[[], object]) -> dict[str, float]:
    seconds, busy = [], []
    for _ in range(repeat):
        gc.collect()
        start, cpu = time.perf_counter(), time.process_time()
        act()
        busy.append(time.process_time() - cpu)
        seconds.append(time.perf_counter() - start)
    return {
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "cpu_median_s": statistics.median(busy),
    }


def measurements(repeat: int) -> dict[str, dict[str, float]]:
    found = {}
    for count in (10_000, 100_000):
        plan, text = built(count), built(count).to_json()
        label = f"{count:,} DTensors"
        found[f"{label}: add, build"] = measure(repeat, lambda n=count: built(n))
        # A fresh plan each time: the digest is kept once it is known.
        found[f"{label}: plan, fingerprint"] = measure(
            repeat, lambda n=count: built(n).fingerprint()
        )
        found[f"{label}: to_json"] = measure(repeat, plan.to_json)
        found[f"{label}: from_json"] = measure(repeat, lambda t=text: MemoryPlan.from_json(t))
        found[f"{label}: look each up"] = measure(repeat, lambda p=plan, n=count: looked_up(p, n))
    for count in (400, 4_000):
        parts = stages(count // 2)
        found[f"{count:,} stages in two phases: edges"] = measure(
            repeat, lambda parts=parts: Program.alternating("bench", parts, parts).edges()
        )
    return found


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each measurement (default 5)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    arguments = parser.parse_args()
    here = machine()
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    found = measurements(arguments.repeat)
    width = max(map(len, found))
    print(f"{'ms':{width}}  {'median':>9}  {'least':>9}  {'most':>9}  {'cpu':>9}")
    for label, times in found.items():
        shown = "  ".join(f"{1e3 * value:9.1f}" for value in times.values())
        print(f"{label:{width}}  {shown}")
    if arguments.json is not None:
        text = json.dumps({"machine": here, "repeat": arguments.repeat, "results": found}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
