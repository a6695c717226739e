"""Does `trlow bench` tell the same times as nccl-tests, eager and in graphs, either way to launch?

    python bench/collectives.py --nccl-tests PATH [--rounds 3] [--cpus 2] [--cycles 3]
                                 [--budget S] [--json FILE]

PATH is all_reduce_perf of nccl-tests; it loads the very library that trlow loads. In-place fp32
sums over all sizes. `threads` stands against -t N, `group` against -g N. For each of the two, eager
and in graphs, small sizes and large ones apart, as both sides walk through a buffer of the largest
size: round by round a worker of trlow bench is started and asked for all sizes, then nccl-tests
runs. Both are fresh processes, because what a small eager call costs the host differs by up to 1.6
times, on either side, as the CPU is that its thread runs on, and that changes within tenths of a
second. So with --cpus both sides of a round run on the same CPUs, N of them and others in each
round; with --cycles trlow walks through the sizes so often in a process, nccl-tests (-N) three
times as often, in about the same time, and the least time of a size is its round's; and what is
compared with the bar is the median of the rounds' differences. Medians and the least of each side
stand beside.

Two clocks: nccl-tests reads the host's, from a barrier to an empty stream, trlow the device's, from
the end of warm-up calls to the end of the last. So nccl-tests' time holds the start of the first
call and the host's noticing of the end once in each loop; long loops make that small.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report

from trlow.bench.job import Job
from trlow.bench.process import start
from trlow.bench.result import read
from trlow.bench.sizes import short, sizes_between
from trlow.bench.variant import Variant

KI, MI = 1 << 10, 1 << 20
LIMIT_S = 60.0
THEIR_CYCLES = 3  # to one of trlow, which takes longer: the CPU has as long to change on both
MEASURED = ("trlow", "nccl-tests", "enqueue", "trlow cycles", "nccl-tests cycles")


@dataclass(frozen=True)
class Part:
    """One loop on both sides."""

    launch: str  # threads or group
    least: int
    most: int
    iterations: int
    launches: int  # of a graph; 0: eager

    @property
    def name(self) -> str:
        """The way, in words."""
        way = "graphs" if self.launches else "eager"
        return f"{self.launch}, {way} of {self.iterations}"

    def sizes(self) -> tuple[int, ...]:
        """Bytes, as nccl-tests takes them."""
        return sizes_between(self.least, self.most, 2, None)

    def bar(self, nbytes: int, reference_us: float) -> float:
        """How far above nccl-tests trlow's time may be, in us."""
        if nbytes >= 4 * MI:
            return 0.03 * reference_us
        if nbytes >= MI:
            return 0.05 * reference_us
        return max(0.5, 0.05 * reference_us) if self.launches else 2.0


def parts(most: int, chosen: str) -> Iterator[Part]:
    """Small sizes get long loops, large ones short ones."""
    for launch in ("threads", "group"):
        for way, small, large in (("graphs", (20, 200), (20, 20)), ("eager", (400, 0), (40, 0))):
            if way in chosen and launch in chosen:
                yield Part(launch, 8, min(most, 256 * KI), *small)
                if most > 256 * KI:
                    yield Part(launch, 512 * KI, most, *large)


def both(arguments: argparse.Namespace, part: Part) -> list[dict[str, Any]]:
    """Rows of one part: every round's time of both sides."""
    job = Job(
        collective="all_reduce",
        dtype="float32",
        most=part.most,
        iterations=part.iterations,
        launches=part.launches,
        variant=Variant(launch=part.launch),
        settings={"device": arguments.device, "gpus": arguments.gpus, "loopback_only": True},
    )
    rows: dict[int, dict[str, Any]] = {
        size: {"size": size, "part": asdict(part), **{key: [] for key in MEASURED}}
        for size in part.sizes()
    }
    for index in range(arguments.rounds):
        if index and time.monotonic() > arguments.until:
            break  # the rows tell by their number of times
        with on_cpus(arguments.cpus, index):
            hello, found = trlow(job, part.sizes(), arguments.cycles)
            for size, times in found.items():
                rows[size]["trlow"].append(min(one["time_us"] for one in times))
                rows[size]["enqueue"].append(min(one["enqueue_us"] for one in times))
                rows[size]["trlow cycles"].append([one["time_us"] for one in times])
            if arguments.nccl_tests is not None:
                others = nccl_tests(arguments, part, hello)
                if others.keys() != found.keys():
                    raise SystemExit(f"nccl-tests measured {sorted(others)}, not {sorted(found)}")
                for size, every in others.items():
                    rows[size]["nccl-tests"].append(min(every))
                    rows[size]["nccl-tests cycles"].append(every)
    return [judged(part, row) for row in rows.values()]


@contextmanager
def on_cpus(count: int, index: int) -> Iterator[None]:
    """What is started meanwhile runs on the `index`-th `count` CPUs; 0: on all."""
    every = sorted(os.sched_getaffinity(0))
    first = index * count
    chosen = {every[(first + place) % len(every)] for place in range(count)}
    os.sched_setaffinity(0, chosen or every)
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def trlow(
    job: Job, sizes: Sequence[int], cycles: int
) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """One process of trlow: what it says of the machine, and each cycle's times by size."""
    worker = start(job, {})
    try:
        hello = worker.ask(LIMIT_S, "hello")
        worker.ask(LIMIT_S, "open")
        found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
        for size in [*sizes] * cycles:
            found[size].append(worker.ask(LIMIT_S, "measure", size=size, place="in-place"))
        worker.close(LIMIT_S)
    finally:
        worker.kill()
    return hello, found


def nccl_tests(
    arguments: argparse.Namespace, part: Part, hello: Mapping[str, Any]
) -> dict[int, list[float]]:
    """One process of nccl-tests; each cycle's us by size."""
    ranks = str(hello["ranks"])
    library = Path(hello["libraries"]["nccl"]["path"])
    way = ["-t", ranks, "-g", "1"] if part.launch == "threads" else ["-t", "1", "-g", ranks]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [str(arguments.nccl_tests), *way, "-o", "sum", "-d", "float", "-c", "0"]
        command += ["-b", str(part.least), "-e", str(part.most), "-f", "2", "-w", "5"]
        command += ["-n", str(part.iterations), "-G", str(part.launches), "-J", str(output)]
        cycles = arguments.cycles * (THEIR_CYCLES if arguments.cycles > 1 else 1)
        command += ["-N", str(cycles)]
        own = {"NCCL_TESTS_DEVICE": str(hello["devices"][0])}
        own["LD_LIBRARY_PATH"] = os.pathsep.join(
            (str(library.parent), os.environ.get("LD_LIBRARY_PATH", ""))
        )
        done = subprocess.run(
            command,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"nccl-tests ended with {done.returncode}: {done.stdout[-2000:]}")
        if output.exists():
            rows = read(output).rows
            told = [(row.size, row.time_us) for row in rows if row.place == "in-place"]
        else:  # size count type redop root | time algbw busbw wrong | time algbw busbw wrong
            lines = [line.split() for line in done.stdout.splitlines() if line[:1] not in {"#", ""}]
            told = [(int(cells[0]), float(cells[9])) for cells in lines if len(cells) == 13]
    found: dict[int, list[float]] = {size: [] for size, _ in told}
    for size, us in told:
        found[size].append(us)
    if any(len(every) != cycles for every in found.values()):
        raise SystemExit(f"nccl-tests did not measure each size {cycles} times")
    return found


def judged(part: Part, row: dict[str, Any]) -> dict[str, Any]:
    """With the median of the rounds' differences, and whether the bar is met."""
    if not row["nccl-tests"]:
        return row
    pairs = zip(row["trlow"], row["nccl-tests"], strict=True)
    more = statistics.median(mine - theirs for mine, theirs in pairs)
    bar = part.bar(row["size"], statistics.median(row["nccl-tests"]))
    return {**row, "more_us": more, "bar_us": bar, "met": more <= bar}


def show(part: Part, rows: list[dict[str, Any]]) -> None:
    print(f"\n{part.name}" + (f", {part.launches} launches" if part.launches else ""))
    cells = []
    for row in rows:
        theirs = row["nccl-tests"]
        cells.append(
            [
                short(row["size"]),
                *(f"{pick(row['trlow']):.2f}" for pick in (statistics.median, min, max)),
                *(f"{pick(theirs):.2f}" if theirs else "-" for pick in (statistics.median, min)),
                f"{row['more_us']:+.2f}" if theirs else "-",
                f"+{row['bar_us']:.2f}" if theirs else "-",
                f"{min(row['enqueue']):.2f}",
                report.verdict(row["met"]) if theirs else "-",
            ]
        )
    titles = ("size", "trlow us", "least", "most", "nccl-tests us", "least", "more us", "bar us")
    report.table((*titles, "enqueue us", ""), cells)


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--nccl-tests", type=Path, help="all_reduce_perf; without it trlow alone")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument(
        "--budget", type=float, help="seconds of the whole; after them a part has one round"
    )
    made.add_argument("--cycles", type=int, default=1, help="through all sizes in each process")
    made.add_argument("--cpus", type=int, default=0, help="on how many CPUs a side runs; 0: all")
    made.add_argument("--most", type=int, default=512 * MI, help="largest size in bytes")
    made.add_argument("--part", default="threads,group,graphs,eager", help="which of them")
    arguments = made.parse_args()
    arguments.until = math.inf if arguments.budget is None else time.monotonic() + arguments.budget
    if arguments.nccl_tests is not None:
        arguments.nccl_tests = arguments.nccl_tests.resolve()
    here = report.machine()
    print(report.header(here))
    results: dict[str, Any] = {"rows": []}
    for part in parts(arguments.most, arguments.part):
        rows = both(arguments, part)
        show(part, rows)
        results["rows"] += rows
        report.save(arguments, here, results)
    judged_rows = [row for row in results["rows"] if "met" in row]
    if judged_rows:
        missed = [row for row in judged_rows if not row["met"]]
        print(f"\n{len(judged_rows) - len(missed)} of {len(judged_rows)} bars met")


if __name__ == "__main__":
    main()
