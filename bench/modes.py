"""Which way of running a step is faster, and what does the watchdog cost?

    python bench/modes.py [--part modes,watch] [--rounds 9] [--json FILE]

modes  Step time of the digits CNN, fused and staged in turn, on one GPU and on all; and of an MLP
       784-1024-512-256-10 with 200 rows per GPU and momentum. The ranks' own clocks, nothing fed.
       Beside it what communication adds to the fused step. Bar: fused not slower on two GPUs.
watch  Step time of that MLP on all GPUs with the watchdog's marks and without, two runtimes in
       turn. Bar: 1 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import report
from tasks import MNIST, random_rows, ranks_of, task_of, train_replay, wide

from trlow.data import load_digits
from trlow.measure import exposed_training_comm_us
from trlow.nn.models import MODELS
from trlow.task import Task

WATCH_SHARE = 0.01


# ------------------------------------------------------------------------------ modes


def modes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Step times, fused and staged in turn."""
    settings = report.settings_of(arguments)
    first = str(settings.devices(64)[0])
    digits, _ = load_digits()
    found = []
    for gpus in dict.fromkeys((first, arguments.gpus)):
        chosen = report.settings_of(arguments, gpus=gpus)
        ranks = ranks_of(chosen)
        for name, model, batch, rows in (
            ("digits CNN", MODELS["cnn"](10), 64, digits),
            ("MLP 784-1024-512-256-10", wide(), 200, random_rows(200 * ranks * 4, MNIST)),
        ):
            with task_of(chosen, model, batch, rows) as task:
                times = in_turn(arguments, task)
                exposed_us = exposed_training_comm_us(task, arguments.round_steps)
            line: dict[str, Any] = {"model": name, "ranks": ranks, "batch_per_rank": batch}
            line |= {mode: report.summary(us) for mode, us in times.items()}
            ratios = [a / b for a, b in zip(times["fused"], times["staged"], strict=True)]
            line["fused_over_staged"] = statistics.median(ratios)
            line["exposed_comm_us"] = exposed_us
            found.append(line)
            print(
                f"{name}, {ranks} ranks of {batch} rows: fused "
                f"{report.short(line['fused'])} us, staged {report.short(line['staged'])} us, "
                f"fused/staged {line['fused_over_staged']:.3f} by round, exposed communication "
                f"{exposed_us:.2f} us",
                flush=True,
            )
    return found


def in_turn(arguments: argparse.Namespace, task: Task) -> Mapping[str, list[float]]:
    """Us per step of each round, by mode."""
    task.fit(1)  # fills the slots; validation has set the learning rate in them to 0
    program = task.compiled.programs["train"]
    replays = {mode: task.runtime.capture(program, mode) for mode in ("fused", "staged")}
    times: dict[str, list[float]] = {mode: [] for mode in replays}
    steps = arguments.round_steps
    for number in range(arguments.rounds + 1):
        for mode in sorted(replays, reverse=bool(number % 2)):
            seconds = report.rank_seconds(task.runtime, replays[mode], steps)
            if number:  # the first round warms up
                times[mode].append(max(seconds) * 1e6 / steps)
    return times


# ------------------------------------------------------------------------------ watch


def watch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Us per step of each round with the watchdog's marks and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    steps = arguments.round_steps
    with ExitStack() as stack:
        tasks = {}
        for marked in times:
            settings = report.settings_of(arguments, watch=marked)
            rows = random_rows(200 * ranks_of(settings) * 4, MNIST)
            tasks[marked] = stack.enter_context(task_of(settings, wide(), 200, rows))
            tasks[marked].fit(1)
        for number in range(arguments.rounds + 1):
            for marked in sorted(times, reverse=bool(number % 2)):
                task = tasks[marked]
                seconds = report.rank_seconds(task.runtime, train_replay(task), steps)
                if number:
                    times[marked].append(max(seconds) * 1e6 / steps)
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    found = {"on": report.summary(times[True]), "off": report.summary(times[False])}
    result: dict[str, Any] = {**found, "cost": statistics.median(ratios) - 1}
    result["met"] = result["cost"] <= WATCH_SHARE
    print(
        f"watchdog on {report.short(result['on'])} us, off {report.short(result['off'])} us, "
        f"cost {100 * result['cost']:.2f} % by round {report.verdict(result['met'])}",
        flush=True,
    )
    return result


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--part", default="modes,watch", help="which of them (default both)")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--round-steps", type=int, default=300)
    arguments = made.parse_args()
    here = report.machine()
    print(report.header(here))
    results: dict[str, Any] = {}
    for part in arguments.part.split(","):
        results[part] = {"modes": modes, "watch": watch}[part](arguments)
        report.save(arguments, here, results)  # a later part may fail


if __name__ == "__main__":
    main()
