"""Which way of making a mean over ranks is fastest at which size, on plain arenas and on windows?

    python bench/means.py [--gpus all] [--rounds 60] [--calls 20] [--most BYTES] [--json FILE]
    python bench/means.py --device host --gpus 0-1 --rounds 3 --most 262144    (a dry run)

Each strategy is one fused graph per rank of CALLS means in place on the same fp32 range. "deferred"
leaves the multiplication to an update that does it anyway, so its row is a sum alone. In a round
every strategy's graph is launched once, in an order that rotates; rounds are enqueued in blocks
without a wait, between events on each rank's own thread, so a sample is the device's time from one
graph's end to the next one's end, over CALLS: that of the slowest rank. One launch before the first
event brings the ranks together. Blocks of the plain and of the window arena take turns.

The range holds normal numbers, and is filled again before sums of sums overflow. The watchdog's
nodes are left out unless --setting watch=true puts them in.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import byref, c_float, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import report

from trlow.dtype import F32
from trlow.errors import TrlowError
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import Program, Stage, Stream
from trlow.range_op import MEAN_STRATEGIES, mean_all_reduce
from trlow.region import Region, RegionTable
from trlow.replay import Replay
from trlow.runtime import Runtime

KI, MI = 1 << 10, 1 << 20
SIZES = (4 * KI, 256 * KI, 4 * MI, 25 * MI, 100 * MI)
ARENAS = ("plain", "window")
HEADROOM = 120  # bits of fp32's range that a block of sums may use up
TIMING = 0  # cudaEventDefault: an event that knows when it was


@dataclass
class Side:
    """One arena's runtime, and a captured graph of each strategy at each size."""

    arena: str
    runtime: Runtime
    calls: int

    def range_of(self, nbytes: int) -> Range:
        """The first bytes of the buffer."""
        return Range(self.runtime.plan.range("buffer").offset, nbytes, F32, "buffer", "buffer")

    def capture(self, nbytes: int) -> dict[str, Replay]:
        """One replay for each strategy."""
        factor = self.runtime.plan.range("factor")
        replays = {}
        for strategy in MEAN_STRATEGIES:
            op = mean_all_reduce(self.range_of(nbytes), factor=factor, strategy=strategy)
            stage = Stage("MEANS", Stream.UPDATE, (op,) * self.calls)
            replays[strategy] = self.runtime.capture(
                Program.single(f"{strategy} of {nbytes}", (stage,))
            )
        for arena in self.runtime.arenas:
            arena.copy_in("factor", np.array([1 / self.runtime.world_size], np.float32))
        return replays

    def refill(self, nbytes: int, block: np.ndarray) -> None:
        """Normal numbers again."""
        span = self.range_of(nbytes)
        for arena in self.runtime.arenas:
            arena.copy_in(span, block[: span.count])

    def launches(self, replays: dict[str, Replay], order: Sequence[str]) -> list[float]:
        """Us per call of each launch in `order`, of the slowest rank."""
        ready = [report.prepared(replays[name]) for name in (order[-1], *order)]

        def timed(rank: Any) -> list[float]:
            graphs = [one[rank.index].phases[0][0] for one in ready]
            return device_times(rank.platform.cudart, graphs)

        times = report.on_ranks(self.runtime, timed, launches=True)
        return [max(each) * 1e3 / self.calls for each in zip(*times, strict=True)]


def device_times(cudart: Any, graphs: Sequence[Any]) -> list[float]:
    """Milliseconds between the ends of graphs launched behind one another; the first has none."""
    events = [c_void_p() for _ in graphs]
    try:
        for event in events:
            cudart.cudaEventCreateWithFlags(byref(event), TIMING)
        for graph, event in zip(graphs, events, strict=True):
            cudart.cudaGraphLaunch(graph.executable, graph.stream)
            cudart.cudaEventRecord(event, graph.stream)
        cudart.cudaEventSynchronize(events[-1])
        found = []
        for k in range(1, len(events)):
            took = c_float()
            cudart.cudaEventElapsedTime(byref(took), events[k - 1], events[k])
            found.append(took.value)
        return found
    finally:
        for event in events:
            if event.value:
                cudart.cudaEventDestroy(event)


def plan_of(nbytes: int) -> MemoryPlan:
    """A buffer and a factor."""
    table = RegionTable(
        "means", (Region("BUFFER", F32, "what is averaged"), Region("FACTOR", F32, "1/N"))
    )
    builder = PlanBuilder(table)
    builder.add("BUFFER", "buffer", (nbytes // F32.itemsize,))
    builder.add("FACTOR", "factor", (1,))
    return builder.build()


def measure(
    sides: Sequence[Side], nbytes: int, rounds: int, block: np.ndarray
) -> list[dict[str, Any]]:
    """One row for each arena and strategy."""
    captured = [side.capture(nbytes) for side in sides]
    ranks = sides[0].runtime.world_size
    # A round sums CALLS times, and the launch before the first one may be of sums too.
    at_once = max(int(HEADROOM / (sides[0].calls * max(math.log2(ranks), 1))) - 1, 1)
    samples: dict[tuple[str, str], list[float]] = {
        (side.arena, strategy): [] for side in sides for strategy in MEAN_STRATEGIES
    }
    for first in range(0, rounds, at_once):
        numbers = range(first, min(first + at_once, rounds))
        order = [
            MEAN_STRATEGIES[(number + k) % len(MEAN_STRATEGIES)]
            for number in numbers
            for k in range(len(MEAN_STRATEGIES))
        ]
        for side, replays in zip(sides, captured, strict=True):
            side.refill(nbytes, block)
            for name, us in zip(order, side.launches(replays, order), strict=True):
                samples[side.arena, name].append(us)
    for side, replays in zip(sides, captured, strict=True):
        for replay in replays.values():
            side.runtime.release(replay)
    return [
        {"nbytes": nbytes, "arena": arena, "strategy": strategy, "us": report.summary(found)}
        for (arena, strategy), found in samples.items()
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each size and arena."""
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        lines.setdefault((row["nbytes"], row["arena"]), {})[row["strategy"]] = row["us"]
    cells = []
    for (nbytes, arena), found in lines.items():
        spreads = [f"{us['median']:.2f} ({us['p5']:.2f}..{us['p95']:.2f})" for us in found.values()]
        fastest = min(found, key=lambda name: found[name]["median"])
        cells.append([f"{nbytes:,} {arena}", *spreads, fastest])
    titles = [f"{name} us (p5..p95)" for name in MEAN_STRATEGIES]
    report.table(("bytes", *titles, "fastest"), cells)


def opened(arguments: argparse.Namespace, stack: ExitStack, largest: int) -> list[Side]:
    """The arenas that were asked for; a window that cannot be is said aloud and left out."""
    quiet = {} if any(s.startswith("watch=") for s in arguments.setting) else {"watch": False}
    sides = []
    for arena in arguments.arenas.split(","):
        more = {"arena": arena, "allow_unabortable": True, "any_world_size": True, **quiet}
        settings = report.settings_of(arguments, **more)
        try:
            runtime = stack.enter_context(Runtime(settings, plan_of(largest)))
        except TrlowError as error:
            if arena == "plain":
                raise
            print(f"no {arena} arena: {error}", file=sys.stderr)
            continue
        sides.append(Side(arena, runtime, arguments.calls))
    return sides


def main() -> None:
    made = report.parser(__doc__)
    made.set_defaults(gpus="all")
    made.add_argument("--rounds", type=int, default=60, help="samples of each row (default 60)")
    made.add_argument("--calls", type=int, default=20, help="means in a graph (default 20)")
    made.add_argument("--most", type=int, default=max(SIZES), help="largest size in bytes")
    made.add_argument("--arenas", default=",".join(ARENAS), help="plain, window or both (default)")
    arguments = made.parse_args()
    sizes = [nbytes for nbytes in SIZES if nbytes <= arguments.most]
    here = report.machine()
    print(report.header(here))
    block = np.random.default_rng(0).standard_normal(max(sizes) // F32.itemsize, np.float32)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = opened(arguments, stack, max(sizes))
        ranks = sides[0].runtime.world_size
        if ranks == 1:
            made.error("one rank has nothing to average: name more devices")
        print(f"{ranks} ranks, {arguments.calls} calls in a graph, {arguments.rounds} rounds")
        for nbytes in sizes:
            rows += measure(sides, nbytes, arguments.rounds, block)
    show(rows)
    report.save(arguments, here, {"ranks": ranks, "calls": arguments.calls, "rows": rows})


if __name__ == "__main__":
    main()
