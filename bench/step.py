"""What does one step cost beside the device's work?

    python bench/step.py [--part loop,train] [--steps 20000] [--json FILE]

loop   One replayed step per rank, nothing fed, no other Python thread but the one that waits (with
       watch=true the watchdog's as well): what lies between the C calls of the loop. timed_calls.c
       stands in for the CUDA runtime and notes on the ranks' own threads when each call entered and
       left it; the rest of a step is Python, ctypes and waiting for the interpreter lock. The wait
       for the step two back is C. Bar: 5 us median, 30 us p99.
train  The same under `Task.fit` with its own feed and progress, on a model whose step is made about
       1 ms long by its batch. GPU idle, in two ways: timing events before and after each launch,
       from the end of one step to the beginning of the next on the stream (the events' own time
       counts as idle, what passes between a launch and its first node does not); and a trace, from
       the end of the last stage of one step to the beginning of the first of the next, by the
       GPU's clock (which has both, and stamps in the step). Each over the period. Bar: 2 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
from tasks import DIGITS, random_rows, ranks_of, task_of, train_replay
from timed_calls import FIRST, TimedCalls, runs_of, steps_of

from trlow.measure import trace_training
from trlow.nn.models import MODELS
from trlow.replay import Replay
from trlow.task import Task

LOOP_MEDIAN_US, LOOP_P99_US, IDLE_SHARE = 5.0, 30.0, 0.02
CALLS_PER_STEP = 8  # at least as many as a fused step makes, to size the notes
TARGET_US = 1000.0


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
                result["by_events"] = idle(timed, train_replay(task), ranks, launches)
            print(f"train: {name} times taken", file=sys.stderr, flush=True)
        result["progress_calls"] = len(drawn)
        print(
            f"train, {ranks} ranks of {batch} rows: Python beside C "
            f"{report.short(result['python'])} us",
            flush=True,
        )
        result["by_trace"] = idle_by_trace(task, min(steps, 300))
    for way, one in (("events", result["by_events"]), ("trace", result["by_trace"])):
        one["met"] = one["idle_share"] <= IDLE_SHARE
        print(
            f"  by {way}: period {report.short(one['period'])} us, gap {report.short(one['gap'])} "
            f"us, idle {100 * one['idle_share']:.2f} % {report.verdict(one['met'])}",
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
            kept = slice(run.start + FIRST, run.stop - 1)  # the last one's gap leads elsewhere
            busy.extend(busy_us[kept])
            gaps.extend(gap_us[kept])
    return shares(gaps, np.add(busy, gaps))


def idle_by_trace(task: Task, steps: int) -> dict[str, Any]:
    """From the end of the last stage of a step to the beginning of the next step's first."""
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    for span in trace_training(task, steps).spans:
        place = (span.rank, span.step)
        begun, ended = extents.get(place, (span.start_us, span.end_us))
        extents[place] = (min(begun, span.start_us), max(ended, span.end_us))
    gaps, periods = [], []
    for (rank, step), (begun, ended) in extents.items():
        after = extents.get((rank, step + 1))
        if after is not None and step >= FIRST:
            gaps.append(after[0] - ended)
            periods.append(after[0] - begun)
    return shares(gaps, periods)


def shares(gaps: Sequence[float], periods: Sequence[float]) -> dict[str, Any]:
    """Summaries, and all gaps over all periods."""
    return {
        "gap": report.summary(gaps),
        "period": report.summary(periods),
        "idle_share": float(np.sum(gaps) / np.sum(periods)),
    }


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--part", default="loop,train", help="which of them (default both)")
    made.add_argument("--steps", type=int, default=20_000, help="steps of loop and train")
    arguments = made.parse_args()
    here = report.machine()
    print(report.header(here))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.part.split(","):
            results[part] = {"loop": loop, "train": train}[part](arguments, Path(folder))
            report.save(arguments, here, results)  # a later part may fail


if __name__ == "__main__":
    main()
