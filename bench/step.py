"""What does one step cost beside the device's work?

    python bench/step.py [--part loop,train,modes] [--steps 20000] [--json FILE]

loop   One replayed step per rank, nothing fed, no other Python thread but the one that waits (with
       watch=true the watchdog's as well): what lies between the C calls of the loop. timed_calls.c
       stands in for the CUDA runtime and notes on the ranks' own threads when each call entered and
       left it; the rest of a step is Python, ctypes and waiting for the interpreter lock. The wait
       for the step two back is C. Bar: 5 us median, 30 us p99.
train  The same under `Task.fit` with its own feed and progress, on a model whose step is made about
       1 ms long by its batch. GPU idle: timing events before and after each launch; from the end
       of one step to the beginning of the next on the stream, over the period. Each event takes
       about a microsecond of the stream itself, which counts as idle here. What passes between
       the launch's place in the stream and its first node does not.  Bar: 2 %.
modes  Step time of the digits CNN, fused and staged in turn, on one GPU and on all; and of an MLP
       784-1024-512-256-10 with 200 rows per GPU and momentum. The ranks' own clocks, nothing fed.
       Bar: fused not slower on two GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import report
from timed_calls import TimedCalls, runs_of, steps_of

from trlow.data import Dataset, load_digits
from trlow.nn.layers import Sequential, fc, flatten, relu, seq
from trlow.nn.models import MODELS
from trlow.replay import Replay
from trlow.schedule import Training
from trlow.settings import Settings
from trlow.task import Task

DIGITS, MNIST = (8, 8, 1), (28, 28, 1)
LOOP_MEDIAN_US, LOOP_P99_US, IDLE_SHARE = 5.0, 30.0, 0.02
CALLS_PER_STEP = 8  # at least as many as a fused step makes, to size the notes
TARGET_US = 1000.0


def random_rows(rows: int, shape: tuple[int, int, int]) -> Dataset:
    """Rows that mean nothing, in ten classes."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 10, rows, np.int32)
    return Dataset("random", random.random((rows, *shape), np.float32), labels, 10)


def task_of(
    settings: Settings, model: Sequential, batch: int, train: Dataset, **training: Any
) -> Task:
    """A task with `batch` rows per rank that validates on one batch."""
    ranks = len(settings.devices(64))
    chosen = {
        "device": settings.device,
        "gpus": settings.gpus,
        "global_batch_size": batch * ranks,
        "cudart_library": settings.cudart_library,
        "host_library": settings.host_library,
        "deadline_s": settings.deadline_s,
        "any_world_size": True,
        "watch": settings.watch,
    }
    one = Dataset(
        train.name, train.features[: batch * ranks], train.labels[: batch * ranks], train.classes
    )
    return Task(Settings(**chosen), model, train, one, training=Training(lr=0.001, **training))


def train_replay(task: Task) -> Replay:
    return task._replays["train"]  # noqa: SLF001  the very graphs that a fit replays


def ranks_of(settings: Settings) -> int:
    return len(settings.devices(64))


# ------------------------------------------------------------------------------ loop


def loop(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Python beside the C calls, for one rank and for all, with the watchdog and without."""
    settings = report.settings_of(arguments)
    timed = TimedCalls(settings, folder)
    found = []
    for gpus in (arguments.gpus, str(settings.devices(64)[0])):
        for watch in (False, True):
            chosen = report.settings_of(arguments, gpus=gpus, watch=watch, **timed.settings)
            ranks = ranks_of(chosen)
            rows = random_rows(64 * ranks * 4, DIGITS)
            with task_of(chosen, MODELS["mlp"](10), 64, rows) as task:
                task.fit(1)  # fills the slots
                timed.start((arguments.steps + 50) * CALLS_PER_STEP)
                train_replay(task).run(arguments.steps + 50)
                timed.start(0)
                line = loop_line(timed, train_replay(task), ranks)
            line |= {"ranks": ranks, "watch": watch}
            line["met"] = (
                line["python"]["median"] <= LOOP_MEDIAN_US and line["python"]["p99"] <= LOOP_P99_US
            )
            found.append(line)
            print(
                f"loop, {ranks} ranks, watch={watch}: Python beside C "
                f"{report.short(line['python'])} us {report.verdict(line['met'])}; period "
                f"{report.short(line['period'])} us; "
                + ", ".join(
                    f"{name} {one['median']:.2f}"
                    for name, one in line["calls"].items()
                    if one["count"]
                ),
                flush=True,
            )
    return found


def loop_line(timed: TimedCalls, replay: Replay, ranks: int) -> dict[str, Any]:
    """Summaries over all ranks' steps."""
    parts = [
        steps_of(notes, handles(replay), launches_per_step(replay)) for notes in timed.notes(ranks)
    ]
    return {
        "python": report.summary(np.concatenate([part.python for part in parts])),
        "period": report.summary(np.concatenate([part.period for part in parts])),
        "calls": {
            name: report.summary(np.concatenate([part.calls[name] for part in parts]))
            for name in parts[0].calls
        },
    }


def handles(replay: Replay) -> set[int]:
    """Every executable graph of a program on any rank."""
    ranks = report.prepared(replay)
    return {item.executable for rank in ranks for phase in rank.phases for item in phase}


def launches_per_step(replay: Replay) -> int:
    return len(report.prepared(replay)[0].phases[0])


# ------------------------------------------------------------------------------ train


def batch_for(arguments: argparse.Namespace, target_us: float) -> tuple[int, float]:
    """Rows per rank that make a CNN's step about as long as the target, and its length."""
    batch, us = 256, 0.0
    for _ in range(4):
        settings = report.settings_of(arguments)
        rows = random_rows(batch * ranks_of(settings), DIGITS)
        with task_of(settings, MODELS["cnn"](10), batch, rows) as task:
            task.fit(1)
            steps = 50 if arguments.device == "host" else 500
            us = max(report.rank_seconds(task.runtime, train_replay(task), steps)) * 1e6 / steps
        if 0.85 * target_us < us < 1.15 * target_us or arguments.device == "host":
            break
        batch = max(8, round(batch * target_us / us / 8) * 8)
    return batch, us


def train(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A fit with its own feed and progress: Python beside C, and the GPUs' idle share."""
    batch, us = batch_for(arguments, TARGET_US)
    settings = report.settings_of(arguments)
    timed = TimedCalls(settings, folder)
    chosen = report.settings_of(arguments, **timed.settings)
    ranks, steps = ranks_of(chosen), min(arguments.steps, 1000)
    epochs = max(1, min(5, arguments.steps // steps))
    rows = random_rows(batch * ranks * steps, DIGITS)
    drawn: list[object] = []
    with task_of(chosen, MODELS["cnn"](10), batch, rows) as task:
        task.fit(1)  # the first epoch counts its own calls
        result = {"batch_per_rank": batch, "ranks": ranks, "step_us_unfed": us, "epochs": epochs}
        for name, launches in (("host", 0), ("device", epochs * (steps + 20))):
            timed.start(epochs * (steps + 50) * CALLS_PER_STEP, launches)
            task.fit(epochs, drawn.append)
            timed.start(0)
            if not launches:
                result |= loop_line(timed, train_replay(task), ranks)
            else:
                result |= idle(timed, train_replay(task), ranks, launches)
            print(f"train: {name} times taken", file=sys.stderr, flush=True)
    result["progress_calls"] = len(drawn)
    result["met"] = result["idle_share"] <= IDLE_SHARE
    print(
        f"train, {ranks} ranks of {batch} rows: Python beside C {report.short(result['python'])} "
        f"us; step {report.short(result['device_period'])} us on the device, gap "
        f"{report.short(result['gap'])} us, idle {100 * result['idle_share']:.2f} % "
        f"{report.verdict(result['met'])}",
        flush=True,
    )
    return result


def idle(timed: TimedCalls, replay: Replay, ranks: int, launches: int) -> dict[str, Any]:
    """From the end of a train step to the beginning of the next, over all epochs and ranks.

    The first steps of each epoch are left out: the feed begins anew there.
    """
    gaps: list[float] = []
    busy: list[float] = []
    device = timed.device(ranks, launches)
    for notes, (busy_us, gap_us) in zip(timed.notes(ranks), device, strict=True):
        launched = notes["handle"][notes["kind"] == 0][: len(busy_us)]
        for run in runs_of(np.isin(launched, list(handles(replay)))):
            kept = slice(run.start + 20, run.stop - 1)  # the last one's gap leads elsewhere
            busy.extend(busy_us[kept])
            gaps.extend(gap_us[kept])
    period = np.add(busy, gaps)
    return {
        "gap": report.summary(gaps),
        "device_period": report.summary(period),
        "idle_share": float(np.sum(gaps) / np.sum(period)),
    }


# ------------------------------------------------------------------------------ modes


def modes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Step times, fused and staged in turn."""
    wide = seq(flatten(), fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10))
    settings = report.settings_of(arguments)
    first = str(settings.devices(64)[0])
    digits, _ = load_digits()
    found = []
    for gpus in dict.fromkeys((first, arguments.gpus)):
        chosen = report.settings_of(arguments, gpus=gpus)
        ranks = ranks_of(chosen)
        for name, model, batch, rows in (
            ("digits CNN", MODELS["cnn"](10), 64, digits),
            ("MLP 784-1024-512-256-10", wide, 200, random_rows(200 * ranks * 4, MNIST)),
        ):
            with task_of(chosen, model, batch, rows) as task:
                times = in_turn(arguments, task)
            line: dict[str, Any] = {"model": name, "ranks": ranks, "batch_per_rank": batch}
            line |= {mode: report.summary(us) for mode, us in times.items()}
            ratios = [a / b for a, b in zip(times["fused"], times["staged"], strict=True)]
            line["fused_over_staged"] = statistics.median(ratios)
            found.append(line)
            print(
                f"{name}, {ranks} ranks of {batch} rows: fused "
                f"{report.short(line['fused'])} us, staged {report.short(line['staged'])} us, "
                f"fused/staged {line['fused_over_staged']:.3f} by round",
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


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--part", default="loop,train,modes", help="which of them (default all)")
    made.add_argument("--steps", type=int, default=20_000, help="steps of loop and train")
    made.add_argument("--rounds", type=int, default=9, help="rounds of modes")
    made.add_argument("--round-steps", type=int, default=500, help="steps of a round of modes")
    arguments = made.parse_args()
    here = report.machine()
    print(report.header(here))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.part.split(","):
            if part == "modes":
                results[part] = modes(arguments)
            else:
                results[part] = {"loop": loop, "train": train}[part](arguments, Path(folder))
            report.save(arguments, here, results)  # a later part may fail


if __name__ == "__main__":
    main()
