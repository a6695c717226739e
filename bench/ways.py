"""Ways of doing the same on a range of all ranks, in turn: what means.py and copies.py share.

Each way is one fused graph per rank of CALLS calls in place on the same fp32 range. In a round
every way's graph is launched once, in an order that rotates; rounds are enqueued in blocks without
a wait, between events on each rank's own thread, so a sample is the device's time from one graph's
end to the next one's end, over CALLS: that of the slowest rank. One launch before the first event
brings the ranks together. Blocks of several runtimes take turns.

The range holds normal numbers, and is filled again before sums of sums overflow.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from ctypes import byref, c_float, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import report

from trlow.dtype import F32
from trlow.plan import Range
from trlow.program import Program, Stage
from trlow.replay import Replay
from trlow.runtime import Runtime

KI, MI = 1 << 10, 1 << 20
HEADROOM = 120  # bits of fp32's range that a block of sums may use up
TIMING = 0  # cudaEventDefault: an event that knows when it was


class Ways(Protocol):
    """What a script measures."""

    def __call__(self, runtime: Runtime, nbytes: int) -> Mapping[str, Sequence[Stage]]:
        """The stages of one graph for each way, in the order of the columns."""


@dataclass
class Side:
    """One runtime, and a captured graph of each way at each size."""

    name: str
    runtime: Runtime
    calls: int

    def capture(self, ways: Ways, nbytes: int) -> dict[str, Replay]:
        """One replay for each way."""
        return {
            name: self.runtime.capture(Program.single(f"{name} of {nbytes}", tuple(stages)))
            for name, stages in ways(self.runtime, nbytes).items()
        }

    def refill(self, nbytes: int, block: np.ndarray) -> None:
        """Normal numbers again."""
        span = span_of(self.runtime, "buffer", nbytes)
        for arena in self.runtime.arenas:
            arena.copy_in(span, block[: span.count])

    def launches(self, replays: Mapping[str, Replay], order: Sequence[str]) -> list[float]:
        """Us per call of each launch in `order`, of the slowest rank."""
        ready = [report.prepared(replays[name]) for name in (order[-1], *order)]

        def timed(rank: Any) -> list[float]:
            graphs = [one[rank.index].phases[0][0] for one in ready]
            return device_times(rank.platform.cudart, graphs)

        times = report.on_ranks(self.runtime, timed, launches=True)
        return [max(each) * 1e3 / self.calls for each in zip(*times, strict=True)]


def span_of(runtime: Runtime, name: str, nbytes: int) -> Range:
    """The first bytes of a tensor."""
    return Range(runtime.plan.range(name).offset, nbytes, F32, name, name)


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


def measure(
    sides: Sequence[Side], ways: Ways, nbytes: int, rounds: int, block: np.ndarray
) -> list[dict[str, Any]]:
    """One row for each side and way."""
    captured = [side.capture(ways, nbytes) for side in sides]
    names = list(captured[0])
    ranks = sides[0].runtime.world_size
    # A round sums CALLS times, and the launch before the first one may be of sums too.
    at_once = max(int(HEADROOM / (sides[0].calls * max(math.log2(ranks), 1))) - 1, 1)
    samples: dict[tuple[str, str], list[float]] = {
        (side.name, name): [] for side in sides for name in names
    }
    for first in range(0, rounds, at_once):
        numbers = range(first, min(first + at_once, rounds))
        order = [names[(number + k) % len(names)] for number in numbers for k in range(len(names))]
        for side, replays in zip(sides, captured, strict=True):
            side.refill(nbytes, block)
            for name, us in zip(order, side.launches(replays, order), strict=True):
                samples[side.name, name].append(us)
    for side, replays in zip(sides, captured, strict=True):
        for replay in replays.values():
            side.runtime.release(replay)
    return [
        {"nbytes": nbytes, "arena": arena, "strategy": name, "us": report.summary(found)}
        for (arena, name), found in samples.items()
    ]


def show(rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> None:
    """A line for each size and side, and which of the rivals is the fastest."""
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        lines.setdefault((row["nbytes"], row["arena"]), {})[row["strategy"]] = row["us"]
    cells = []
    for (nbytes, arena), found in lines.items():
        spreads = [f"{us['median']:.2f} ({us['p5']:.2f}..{us['p95']:.2f})" for us in found.values()]
        fastest = min(rivals, key=lambda name: found[name]["median"])
        cells.append([f"{nbytes:,} {arena}", *spreads, fastest])
    titles = [f"{name} us (p5..p95)" for name in dict.fromkeys(row["strategy"] for row in rows)]
    report.table(("bytes", *titles, "fastest"), cells)


def parser(doc: str | None, sizes: Sequence[int]) -> argparse.ArgumentParser:
    """The options of both scripts."""
    made = report.parser(doc)
    made.set_defaults(gpus="all")
    made.add_argument("--rounds", type=int, default=60, help="samples of each row (default 60)")
    made.add_argument("--calls", type=int, default=20, help="calls in a graph (default 20)")
    made.add_argument("--most", type=int, default=max(sizes), help="largest size in bytes")
    return made


def quiet(arguments: argparse.Namespace) -> dict[str, Any]:
    """The watchdog's nodes are left out unless --setting watch=true puts them in."""
    return {} if any(s.startswith("watch=") for s in arguments.setting) else {"watch": False}


def run(
    arguments: argparse.Namespace,
    sides: Sequence[Side],
    ways: Ways,
    sizes: Sequence[int],
    rivals: Sequence[str],
) -> None:
    """Measure all sizes, show them and save them; ``rivals`` are the ways that do the same."""
    here = report.machine()
    print(report.header(here))
    block = np.random.default_rng(0).standard_normal(max(sizes) // F32.itemsize, np.float32)
    ranks, calls = sides[0].runtime.world_size, arguments.calls
    print(f"{ranks} ranks, {calls} calls in a graph, {arguments.rounds} rounds")
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        rows += measure(sides, ways, nbytes, arguments.rounds, block)
    show(rows, rivals)
    report.save(arguments, here, {"ranks": ranks, "calls": calls, "rows": rows})
