"""One process that times captured sums through trlow; `allreduce.py` starts it and reads its JSON.

Every work becomes one fused program of `calls` stages. All are captured before the first is timed.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import report

from trlow import range_op
from trlow.dtype import F32
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import External, Program, Stage, Stream
from trlow.region import Region, RegionTable
from trlow.runtime import Runtime

BLOCK = 16 << 20  # bytes of random numbers that fill the buffer, over and over
NCCL_FLOAT, NCCL_SUM = 7, 0


@dataclass(frozen=True)
class Work:
    """Sums of `nbytes` bytes, at offsets that walk through `window` bytes as nccl-tests' do."""

    nbytes: int
    window: int
    calls: int
    launches: int
    repeats: int  # the first is warm-up unless it is the only one
    issue: str = "group"  # "group": one for all ranks; "thread": each rank's thread by itself

    def ranges(self) -> list[Range]:
        """One range for each call. Below the plan's alignment no slot could lie where these do."""
        places = max(1, self.window // self.nbytes)
        return [
            Range(call % places * self.nbytes, self.nbytes, F32, "buffer", "buffer")
            for call in range(self.calls)
        ]


def plan_of(nbytes: int) -> MemoryPlan:
    """One buffer and nothing else."""
    table = RegionTable("all-reduce", (Region("BUFFER", F32, "what is summed"),))
    builder = PlanBuilder(table)
    builder.add("BUFFER", "buffer", (nbytes // F32.itemsize,))
    return builder.build()


def program_of(runtime: Runtime, number: int, work: Work) -> Program:
    """A stage for each call, so that every call is a group of its own."""
    stages = []
    for call, one in enumerate(work.ranges()):
        if work.issue == "group":
            stage = Stage(f"CALL_{call}", Stream.UPDATE, (range_op.sum_all_reduce(one),))
        else:
            external = External("callback", (one,), (one,), issuer(runtime, one), ("comm:0",))
            stage = Stage(f"CALL_{call}", Stream.UPDATE, external=external)
        stages.append(stage)
    return Program.single(f"work {number}", stages)


def issuer(runtime: Runtime, one: Range) -> Callable[[int, int], None]:
    """What each rank's thread calls by itself, without a group."""
    nccl = runtime.platform.nccl

    def issue(rank: int, stream: int) -> None:
        communicators = runtime._team._communicators  # noqa: SLF001  no public way to issue so
        assert communicators is not None
        address = runtime.arenas[rank].base + one.offset
        handle = communicators.handles[rank]
        nccl.ncclAllReduce(address, address, one.count, NCCL_FLOAT, NCCL_SUM, handle, stream)

    return issue


def refill(runtime: Runtime, work: Work, block: np.ndarray) -> None:
    """Random numbers where `work` sums: zeros would be faster than data."""
    end = min(runtime.plan.arena_nbytes, max(one.end for one in work.ranges()))
    for arena in runtime.arenas:
        for offset in range(0, end, block.nbytes):
            nbytes = min(block.nbytes, end - offset)
            span = Range(offset, nbytes, F32, "buffer", "buffer")
            arena.copy_in(span, block[: span.count])


def measure(runtime: Runtime, works: list[Work]) -> list[dict[str, Any]]:
    """Us per call of each work: the median of its repeats, each averaged over ranks."""
    replays = [
        runtime.capture(program_of(runtime, number, work)) for number, work in enumerate(works)
    ]
    block = np.random.default_rng(0).standard_normal(BLOCK // F32.itemsize, np.float32)
    found = []
    for work, replay in zip(works, replays, strict=True):
        samples = []
        for _ in range(work.repeats):
            refill(runtime, work, block)
            seconds = report.rank_seconds(runtime, replay, work.launches)
            samples.append(statistics.fmean(seconds) * 1e6 / (work.calls * work.launches))
        kept = samples[1:] or samples
        nodes = report.prepared(replay)[0].graphs.nodes
        kinds = Counter(kind for found_nodes in nodes.values() for kind in found_nodes)
        line = {**asdict(work), "us": statistics.median(kept), "samples": samples}
        found.append(line | {"nodes": dict(kinds)})
    return found


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--works", required=True, help="JSON: a list of Work")
    arguments = made.parse_args()
    works = [Work(**fields) for fields in json.loads(arguments.works)]
    largest = max(one.end for work in works for one in work.ranges())
    with Runtime(report.settings_of(arguments), plan_of(largest)) as runtime:
        print(json.dumps(measure(runtime, works)))


if __name__ == "__main__":
    main()
