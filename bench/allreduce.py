"""Is a captured in-place fp32 sum through trlow as fast as nccl-tests says that NCCL is?

    python bench/allreduce.py --nccl-tests PATH [--rounds 5] [--explain] [--json FILE]

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

--explain measures the smallest size once more in ways that are easily confused: alone from launch
to completion, few or many calls in a graph, issued by each rank's thread without a group, with and
without NCCL_GRAPH_MIXING_SUPPORT. With it, NCCL puts an event-record node between two calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from allreduce_worker import Work

KI, MI = 1 << 10, 1 << 20
FACTOR = {"small": 8, "large": 2}  # nccl-tests' -f
LIMIT_S = 90  # seconds for one process of one side
Found = dict[int, float]  # bytes -> us per call


class SideError(Exception):
    """One process of one side failed; its round does not count."""


@dataclass(frozen=True)
class Sweep:
    """One process of nccl-tests: sizes from `least` to `most` by a factor."""

    name: str
    least: int
    most: int
    calls: int
    launches: int

    def sizes(self) -> Iterator[int]:
        """Bytes of each call, as nccl-tests takes them."""
        size = self.least
        while size <= self.most:
            yield size
            size *= FACTOR[self.name]

    def works(self, repeats: int) -> list[Work]:
        """The same for trlow."""
        return [Work(size, self.most, self.calls, self.launches, repeats) for size in self.sizes()]


def bar(nbytes: int, reference_us: float) -> float:
    """How much slower trlow may be, in us."""
    if nbytes >= 4 * MI:
        return 0.03 * reference_us
    return 0.05 * reference_us if nbytes >= MI else max(0.5, 0.05 * reference_us)


# ------------------------------------------------------------------------------ both sides


def trlow_side(
    arguments: argparse.Namespace,
    works: Sequence[Work],
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One fresh process that measures `works`; `extra` are settings as NAME=VALUE."""
    command = [sys.executable, str(Path(__file__).with_name("allreduce_worker.py"))]
    command += ["--device", arguments.device, "--gpus", arguments.gpus]
    for setting in (*arguments.setting, *extra):
        command += ["--setting", setting]
    command += ["--works", json.dumps([asdict(work) for work in works])]
    told = run(command, env)
    found: list[dict[str, Any]] = json.loads(told.splitlines()[-1])
    return found


def nccl_tests_side(
    arguments: argparse.Namespace,
    sweep: Sweep,
    library: str,
    env: Mapping[str, str] | None = None,
) -> Found:
    """One process of nccl-tests. Raises if it found a wrong sum."""
    ranks = len(arguments.gpus_list)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [str(arguments.nccl_tests), "-t", str(ranks), "-g", "1", "-o", "sum"]
        command += ["-d", "float", "-b", str(sweep.least), "-e", str(sweep.most)]
        command += ["-f", str(FACTOR[sweep.name]), "-n", str(sweep.calls)]
        command += ["-G", str(sweep.launches), "-J", str(output)]
        own = {"NCCL_TESTS_DEVICE": str(arguments.gpus_list[0])}
        own["LD_LIBRARY_PATH"] = os.pathsep.join(
            (str(Path(library).parent), os.environ.get("LD_LIBRARY_PATH", ""))
        )
        told = run(command, {**own, **(env or {})})
        lines = in_place(output, told)
    wrong = [nbytes for nbytes, _, count in lines if count]
    if wrong or not lines:
        raise SideError(f"nccl-tests found wrong sums at {wrong}:\n{told}")
    return {nbytes: us for nbytes, us, _ in lines}


def in_place(output: Path, told: str) -> list[tuple[int, float, float]]:
    """(bytes, us, wrong elements) of each in-place line: of the JSON, else of the printed table."""
    try:
        lines = json.loads(output.read_text())["results"]
    except (OSError, ValueError, KeyError):
        # size count type redop root | time algbw busbw wrong | time algbw busbw wrong
        cells = [line.split() for line in told.splitlines() if line[:1] not in {"#", ""}]
        rows = [row for row in cells if len(row) == 13 and row[0].isdigit()]
        return [(int(row[0]), float(row[9]), float(row[12])) for row in rows]
    places = [(int(line["size"]), line["in_place"]) for line in lines]
    return [(nbytes, float(one["time"]), float(one["nwrong"])) for nbytes, one in places]


def run(command: Sequence[str], env: Mapping[str, str] | None) -> str:
    """Run one side to its end. Raises SideError with everything it said."""
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SideError(f"{error}\n{error.stdout}\n{error.stderr}") from error
    return done.stdout


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


# ------------------------------------------------------------------------------ --explain


def explain(arguments: argparse.Namespace, library: str) -> list[dict[str, Any]]:
    """The smallest size in ways that are easily confused with one another; medians of rounds."""
    window = 256 * KI
    ways = {
        "20 calls x 200 launches, one group for all ranks": Work(8, window, 20, 200, 2),
        "the same, each rank's thread issues its own": Work(8, window, 20, 200, 2, "thread"),
        "1 call x 2000 launches": Work(8, window, 1, 2000, 2),
        "100 calls x 40 launches": Work(8, window, 100, 40, 2),
        "20 calls, one launch timed alone": Work(8, window, 20, 1, 11),
        "100 calls, one launch timed alone": Work(8, window, 100, 1, 11),
        "20 calls, same 8 bytes each": Work(8, 8, 20, 200, 2),
    }
    samples: dict[tuple[str, str], list[float]] = {}
    nodes: dict[tuple[str, str], Any] = {}
    for _ in range(min(2, arguments.rounds)):
        for mixing in ("1", "0"):
            env = {"NCCL_GRAPH_MIXING_SUPPORT": mixing}
            for watch, some in (("true", dict([*ways.items()][:1])), ("false", ways)):
                extra = (f"watch={watch}",)
                lines = trlow_side(arguments, list(some.values()), extra, env)
                for way, line in zip(some, lines, strict=True):
                    key = (mixing, f"trlow, watch={watch}: {way}")
                    samples.setdefault(key, []).append(line["us"])
                    nodes[key] = line["nodes"]
            if arguments.nccl_tests is None:
                continue
            for calls, launches in ((20, 200), (20, 20), (100, 40), (20, 1))[
                : 4 * int(mixing) or 1
            ]:
                sweep = Sweep("small", 8, 8, calls, launches)
                us = nccl_tests_side(arguments, sweep, library, env)[8]
                way = f"nccl-tests: {calls} calls x {launches} launches"
                samples.setdefault((mixing, way), []).append(us)
    return [
        {"mixing": mixing, "way": way, "us": report.summary(us), "nodes": nodes.get((mixing, way))}
        for (mixing, way), us in samples.items()
    ]


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--nccl-tests", type=Path, help="all_reduce_perf; without it trlow alone")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--most", type=int, default=512 * MI, help="largest size in bytes")
    made.add_argument("--explain", action="store_true", help="take the smallest size apart")
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
    found = rows(compare(arguments, sweeps, library))
    results: dict[str, Any] = {"sweeps": [asdict(sweep) for sweep in sweeps], "sizes": found}
    show(found, arguments.beside)
    report.save(arguments, here, results)
    if arguments.explain:
        try:
            results["explain"] = explain(arguments, library)
        except SideError as error:
            raise SystemExit(str(error)) from error
        cells = [
            (line["way"], line["mixing"], spread(line["us"]), line["nodes"] or "")
            for line in results["explain"]
        ]
        report.table(("8 bytes", "mixing", "us (least..most)", "nodes of a graph"), cells)
        report.save(arguments, here, results)


if __name__ == "__main__":
    main()
