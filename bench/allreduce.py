"""Is a captured in-place fp32 sum through trlow as fast as nccl-tests says that NCCL is?

    python bench/allreduce.py --nccl-tests PATH [--part sizes,explain] [--rounds 5] [--json FILE]

PATH is all_reduce_perf of nccl-tests, built against the NCCL at hand; it loads the very library
that trlow loads. Both sides run in turn, each round in fresh processes, with the same environment;
medians over rounds are compared, and the ratio within each round tells how far to trust them.

What nccl-tests times with `-t 2 -n CALLS -G LAUNCHES` (its common.cu, BenchTime): one eager call
and a wait; every thread captures CALLS calls, instantiates, meets the other thread at a barrier,
reads the clock, launches its graph LAUNCHES times without a wait between, polls its stream until it
is empty, and reads the clock again. Time per call is that over CALLS * LAUNCHES, averaged over the
threads. Call i of a graph works at offset (i mod (largest / size)) * size of one buffer as large as
the largest size of the process. The in-place column comes second at each size.

The trlow side does the same: CALLS stages of one sum each, at the same offsets, one fused graph per
rank, LAUNCHES steps of trlow's own loop between two readings of the clock on the rank's thread,
averaged over ranks, the second of two runs. It differs where trlow does: one group for all ranks,
from one thread, at capture; an event after each launch, and a wait for the launch two back.

The part explain measures 8 bytes once more in ways that are easily confused: alone from launch to
completion, few or many calls in a graph, issued by each rank's thread without a group, with and
without the watchdog's marks, with and without NCCL_GRAPH_MIXING_SUPPORT. With that (the default)
NCCL puts an event-record node between two calls of a graph, on both sides of this comparison.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import report
from allreduce_sides import KI, MI, Found, SideError, Sweep, nccl_tests_side, trlow_side
from allreduce_worker import Work


def bar(nbytes: int, reference_us: float) -> float:
    """How much slower trlow may be, in us."""
    if nbytes >= 4 * MI:
        return 0.03 * reference_us
    return 0.05 * reference_us if nbytes >= MI else max(0.5, 0.05 * reference_us)


# ------------------------------------------------------------------------------ the comparison


def compare(
    arguments: argparse.Namespace, sweeps: Sequence[Sweep], library: str
) -> dict[str, list[Found]]:
    """Every side's us per call of every round, the sides in turn and the first one in turn too."""
    works = [work for sweep in sweeps for work in sweep.works(2)]

    def side(name: str) -> Found:
        if name == "nccl-tests":
            parts = [nccl_tests_side(arguments, sweep, library) for sweep in sweeps]
            return {nbytes: us for part in parts for nbytes, us in part.items()}
        lines = trlow_side(arguments, works, () if name == "trlow" else (name,))
        return {line["nbytes"]: line["us"] for line in lines}

    order = ["trlow", *arguments.beside, *(["nccl-tests"] if arguments.nccl_tests else [])]
    found: dict[str, list[Found]] = {name: [] for name in order}
    for number in range(arguments.rounds):
        turn = order if number % 2 else order[::-1]
        try:
            one = {name: side(name) for name in turn}
        except SideError as error:
            print(f"round {number + 1} failed: {error}", file=sys.stderr, flush=True)
            continue
        for name in order:
            found[name].append(one[name])
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    if not found["trlow"]:
        raise SystemExit("no round came to its end")
    return found


def rows(found: Mapping[str, Sequence[Found]]) -> list[dict[str, Any]]:
    """One row per size: medians and spreads of every side, ratio, bar."""
    made = []
    for nbytes in found["trlow"][0]:
        row: dict[str, Any] = {"nbytes": nbytes}
        for name, rounds in found.items():
            row[name] = report.summary(one[nbytes] for one in rounds)
        if "nccl-tests" in found:
            ours, theirs = row["trlow"]["median"], row["nccl-tests"]["median"]
            row["ratio"] = ours / theirs
            row["ratio_by_round"] = [
                one[nbytes] / other[nbytes]
                for one, other in zip(found["trlow"], found["nccl-tests"], strict=True)
            ]
            row["bar_us"] = bar(nbytes, theirs)
            row["met"] = ours - theirs <= row["bar_us"]
        made.append(row)
    return made


def show(found: Sequence[Mapping[str, Any]], beside: Sequence[str]) -> None:
    cells = []
    for row in found:
        theirs = row.get("nccl-tests")
        cells.append(
            [
                f"{row['nbytes']:,}",
                spread(row["trlow"]),
                *(spread(row[name]) for name in beside),
                spread(theirs) if theirs else "-",
                f"{row['ratio']:.3f}" if theirs else "-",
                f"{statistics.median(row['ratio_by_round']):.3f}" if theirs else "-",
                f"+{row['bar_us']:.2f}" if theirs else "-",
                report.verdict(row["met"]) if theirs else "-",
            ]
        )
    titles = ("bytes", "trlow us (least..most)", *beside, "nccl-tests us (least..most)")
    report.table((*titles, "ratio", "by round", "bar us", ""), cells)


def spread(one: Mapping[str, float]) -> str:
    return f"{one['median']:.2f} ({one['least']:.2f}..{one['most']:.2f})"


# ------------------------------------------------------------------------------ explain


WINDOW = 256 * KI  # bytes that the calls of 8 bytes walk through
USUAL = {"20 calls x 200 launches, one group for all ranks": Work(8, WINDOW, 20, 200, 2)}
WAYS = {
    **USUAL,
    "1 call x 2000 launches": Work(8, WINDOW, 1, 2000, 2),
    "100 calls x 40 launches": Work(8, WINDOW, 100, 40, 2),
    "20 calls, one launch timed alone": Work(8, WINDOW, 20, 1, 11),
    "100 calls, one launch timed alone": Work(8, WINDOW, 100, 1, 11),
    "20 calls, same 8 bytes each": Work(8, 8, 20, 200, 2),
}
BY_THREAD = {"20 calls x 200 launches, each thread its own": Work(8, WINDOW, 20, 200, 2, "thread")}
SHAPES = ((20, 200), (20, 20), (100, 40), (20, 1))  # calls and launches of nccl-tests


def explain(arguments: argparse.Namespace, library: str) -> list[dict[str, Any]]:
    """8 bytes in ways that are easily confused with one another; a way that fails is left out."""
    samples: dict[tuple[str, str], list[float]] = {}
    nodes: dict[tuple[str, str], Any] = {}

    def trlow(mixing: str, ways: Mapping[str, Work], watch: str) -> None:
        env = {"NCCL_GRAPH_MIXING_SUPPORT": mixing}
        lines = trlow_side(arguments, list(ways.values()), (f"watch={watch}",), env)
        for way, line in zip(ways, lines, strict=True):
            key = (mixing, f"trlow, watch={watch}: {way}")
            samples.setdefault(key, []).append(line["us"])
            nodes[key] = line["nodes"]

    def nccl_tests(mixing: str, calls: int, launches: int) -> None:
        env = {"NCCL_GRAPH_MIXING_SUPPORT": mixing}
        us = nccl_tests_side(arguments, Sweep("small", 8, 8, calls, launches), library, env)[8]
        key = (mixing, f"nccl-tests: {calls} calls x {launches} launches")
        samples.setdefault(key, []).append(us)

    turns: list[Callable[[], None]] = []
    for mixing in ("1", "0"):
        turns += [
            partial(trlow, mixing, ways, watch)
            for ways, watch in ((WAYS, "false"), (USUAL, "true"), (BY_THREAD, "false"))
        ]
        if arguments.nccl_tests is not None:
            shapes = SHAPES if mixing == "1" else SHAPES[:1]
            turns += [partial(nccl_tests, mixing, *shape) for shape in shapes]
    for turn in turns * min(2, arguments.rounds):
        try:
            turn()
        except SideError as error:
            print(f"one way failed: {error}", file=sys.stderr, flush=True)
    return [
        {"mixing": mixing, "way": way, "us": report.summary(us), "nodes": nodes.get((mixing, way))}
        for (mixing, way), us in samples.items()
    ]


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--nccl-tests", type=Path, help="all_reduce_perf; without it trlow alone")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--most", type=int, default=512 * MI, help="largest size in bytes")
    made.add_argument("--part", default="sizes,explain", help="which of them (default both)")
    made.add_argument(
        "--beside", action="append", default=[], metavar="NAME=VALUE", help="one more trlow column"
    )
    arguments = made.parse_args()
    chosen = report.settings_of(arguments)
    arguments.gpus_list = chosen.devices(64)
    if arguments.nccl_tests is not None:
        ordinal = arguments.gpus_list[0]
        if arguments.gpus_list != tuple(range(ordinal, ordinal + len(arguments.gpus_list))):
            made.error("nccl-tests takes neighbouring GPUs: give --gpus an interval")
        arguments.nccl_tests = arguments.nccl_tests.resolve()
    here = report.machine()
    library = (here["libraries"].get("nccl") or {}).get("path") or ""
    print(report.header(here))
    sweeps = [
        Sweep("small", 8, min(arguments.most, 256 * KI), 20, 200),
        Sweep("large", MI, arguments.most, 20, 20),
    ]
    sweeps = [sweep for sweep in sweeps if sweep.least <= sweep.most]
    results: dict[str, Any] = {}
    if "sizes" in arguments.part:
        results["sweeps"] = [asdict(sweep) for sweep in sweeps]
        results["sizes"] = rows(compare(arguments, sweeps, library))
        show(results["sizes"], arguments.beside)
        report.save(arguments, here, results)
    if "explain" in arguments.part:
        results["explain"] = explain(arguments, library)
        cells = [
            (line["way"], line["mixing"], spread(line["us"]), line["nodes"] or "")
            for line in results["explain"]
        ]
        report.table(("8 bytes", "mixing", "us (least..most)", "nodes of a graph"), cells)
        report.save(arguments, here, results)


if __name__ == "__main__":
    main()
