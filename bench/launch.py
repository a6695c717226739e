"""Is launching the fused step as cheap as launching a graph of the same shape from C?

    python bench/launch.py [--rounds 5] [--steps 5000] [--json FILE]

The graphs of a train program are exported as node types and edges; launch_graph.cu, compiled here
with nvcc, builds graphs of the same nodes and edges whose kernels do nothing, and launches them
from a thread per GPU with the same wait for the launch two back. The first kernel of each spins, so
that a step lasts as long as trlow's. trlow launches from its ranks' own threads, with Python's
clock around the call, so ctypes and the error check count; what C alone took is shown beside.
Both sides run in turn. Bar: trlow's median at most twice C's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import report
from tasks import DIGITS, random_rows, task_of, train_replay
from timed_calls import LAUNCH, TimedCalls

from trlow.device import Platform
from trlow.nn.models import MODELS
from trlow.nodes import nodes_of
from trlow.replay import Replay
from trlow.settings import Settings
from trlow.task import Task

SOURCE = Path(__file__).with_name("launch_graph.cu")
KERNEL, MEMCPY = 0, 1  # cudaGraphNodeType
KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 5: "empty", 6: "wait_event", 7: "event_record"}
BAR = 2.0
SKIPPED = 50  # first launches left out on both sides


@dataclass(frozen=True)
class Topology:
    """One graph: the kind of each node, and edges as pairs of node numbers."""

    kinds: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]

    def text(self, memcpy_nbytes: int) -> str:
        """As launch_graph.cu reads it."""
        nodes = (f"{kind} {memcpy_nbytes}" if kind == MEMCPY else str(kind) for kind in self.kinds)
        pairs = (f"{a} {b}" for a, b in self.edges)
        counts = f"{len(self.kinds)} nodes {len(self.edges)} edges"
        return "\n".join((counts, " ".join(nodes), *pairs))

    def describe(self) -> dict[str, Any]:
        """Counts for the JSON."""
        counted = Counter(KINDS.get(kind, str(kind)) for kind in self.kinds)
        return {"nodes": dict(counted), "edges": len(self.edges)}


def topology(platform: Platform, graph: int) -> Topology:
    """The nodes and edges of a graph."""
    nodes = nodes_of(platform, graph)
    kinds = [kind for _, kind in nodes]
    place = {node: index for index, (node, _) in enumerate(nodes)}
    pairs = edges_of(platform, graph)
    if pairs is None:  # the host device does not tell its edges: a chain stands for them
        return Topology(tuple(kinds), tuple(pairwise(range(len(kinds)))))
    return Topology(tuple(kinds), tuple((place[a], place[b]) for a, b in pairs))


def edges_of(platform: Platform, graph: int) -> list[tuple[int | None, int | None]] | None:
    """Pairs of node handles. The function's arguments differ between CUDA 12 and 13."""
    if platform.host is not None:
        return None
    function = ctypes.CDLL(platform.cudart.path).cudaGraphGetEdges
    function.restype = c_int
    newer = platform.cudart.version >= 13_000
    count = c_size_t()
    graph_argument = c_void_p(graph)
    head: list[Any] = [graph_argument, None, None, *([None] if newer else []), byref(count)]
    code = function(*head)
    sources, targets = (c_void_p * count.value)(), (c_void_p * count.value)()
    data = (ctypes.c_ubyte * (8 * count.value))()  # cudaGraphEdgeData is 8 bytes
    tail: list[Any] = [sources, targets, *([data] if newer else []), byref(count)]
    code = code or function(graph_argument, *tail)
    if code:
        raise SystemExit(f"cudaGraphGetEdges failed: {code}")
    return list(zip(sources, targets, strict=True))


def export(task: Task, path: Path) -> list[Topology]:
    """Write the graphs of rank 0's train program; every rank's are the same."""
    ready = report.prepared(train_replay(task))[0]
    found = [topology(task.runtime.platform, graph) for graph in ready.graphs.graphs.values()]
    nbytes = max(1, ready.rank.feed.span("A").nbytes)
    path.write_text("\n".join([f"graphs {len(found)}", *(one.text(nbytes) for one in found)]))
    return found


# ------------------------------------------------------------------------------ the two sides


def trlow_side(task: Task, replay: Replay, steps: int) -> list[float]:
    """Us of each launch call, from the ranks' threads; ctypes and its check included."""
    ready = report.prepared(replay)

    def launch(rank: Any) -> list[int]:
        mine = ready[rank.index]
        cudart = rank.platform.cudart
        call, record, wait = (
            cudart.cudaGraphLaunch,
            cudart.cudaEventRecord,
            cudart.cudaEventSynchronize,
        )
        clock, took = time.perf_counter_ns, []
        for step in range(steps):
            if step >= 2:
                for event, _ in mine.ends[step % 2]:
                    wait(event)
            (item,) = mine.phases[step % len(mine.phases)]
            begun = clock()
            call(item.executable, item.stream)
            took.append(clock() - begun)
            for event, stream in mine.ends[step % 2]:
                record(event, stream)
        rank.streams.synchronize()
        return took

    found = report.on_ranks(task.runtime, launch, launches=True)
    return [ns / 1e3 for took in found for ns in took[SKIPPED:]]


def c_side(
    program: Path, shape: Path, settings: Settings, steps: int, spin_us: float
) -> list[float]:
    """Us of each launch call in C."""
    output = shape.with_name("took.txt")
    devices = ",".join(map(str, settings.devices(64)))
    command = [str(program), str(shape), devices, str(steps), f"{spin_us:.1f}", str(output)]
    subprocess.run(command, check=True, timeout=60)
    lines = np.loadtxt(output, dtype=np.int64, ndmin=2)
    found: list[float] = []
    for device in np.unique(lines[:, 0]):
        found.extend(lines[lines[:, 0] == device, 1][SKIPPED:] / 1e3)
    return found


def compiled(folder: Path, compiler: str) -> Path:
    """launch_graph.cu for the GPU at hand."""
    program = folder / "launch_graph"
    command = [compiler, "-O2", "-std=c++17", "-arch=native", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True, timeout=120)
    return program


def nvcc() -> str | None:
    """Nvidia's compiler on the PATH, or where it is usually put."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def in_turn(arguments: argparse.Namespace, task: Task, timed: TimedCalls, folder: Path) -> Any:
    """Round by round: trlow, then C. Us of every launch of each."""
    replay, shape = train_replay(task), folder / "topology.txt"
    shapes = export(task, shape)
    ranks = task.runtime.world_size
    steps = 500
    step_us = max(report.rank_seconds(task.runtime, replay, steps)) * 1e6 / steps
    program = arguments.program
    if program is None and arguments.device == "cuda":
        compiler = nvcc()
        if compiler is None:
            raise SystemExit("no nvcc to compile launch_graph.cu with; or give --program")
        program = compiled(folder, compiler)
    sides: dict[str, list[list[float]]] = {"trlow": [], "trlow_in_c": [], "c": []}
    for number in range(arguments.rounds):
        timed.start(4 * arguments.steps)
        sides["trlow"].append(trlow_side(task, replay, arguments.steps))
        timed.start(0)
        inner: list[float] = []
        for notes in timed.notes(ranks):
            ours = notes[notes["kind"] == LAUNCH][SKIPPED:]
            inner.extend((ours["ended"] - ours["begun"]) / 1e3)
        sides["trlow_in_c"].append(inner)
        if program is not None:
            took = c_side(program, shape, task.settings, arguments.steps, step_us)
            sides["c"].append(took)
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    return shapes, step_us, sides


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=5000, help="launches of a round and rank")
    made.add_argument("--program", type=Path, help="launch_graph, compiled already")
    arguments = made.parse_args()
    here = report.machine()
    print(report.header(here))
    plain = report.settings_of(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed = TimedCalls(plain, folder)
        chosen = report.settings_of(arguments, **timed.settings)
        rows = random_rows(64 * len(plain.devices(64)) * 4, DIGITS)
        with task_of(chosen, MODELS["cnn"](10), 64, rows) as task:
            task.fit(1)
            shapes, step_us, sides = in_turn(arguments, task, timed, folder)
    results: dict[str, Any] = {
        "model": "digits CNN, 64 rows per rank, fused",
        "step_us": step_us,
        "graphs": [shape.describe() for shape in shapes],
    }
    for name, rounds in sides.items():
        if rounds:
            results[name] = report.summary(np.concatenate(rounds))
            results[name]["median_by_round"] = [statistics.median(one) for one in rounds]
            print(f"{name:11} {report.short(results[name])} us")
    print(f"step {step_us:.1f} us; graphs {results['graphs']}")
    if sides["c"]:
        results["ratio"] = results["trlow"]["median"] / results["c"]["median"]
        results["met"] = results["ratio"] <= BAR
        print(f"trlow / C {results['ratio']:.2f} {report.verdict(results['met'])}")
    report.save(arguments, here, results)


if __name__ == "__main__":
    main()
