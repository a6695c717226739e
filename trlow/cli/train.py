"""`trlow train`: a model on all ranks, validated after every epoch, with a report.

Everything that can be wrong with the request is found before a device is opened: first the words,
then the report's path, then data and sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

from trlow import data
from trlow.cli.console import Console
from trlow.cli.given import given
from trlow.cli.output import check_different, writable, write
from trlow.cli.units import binary
from trlow.errors import RankError, SettingsError, TrlowError
from trlow.measure import exposed_training_comm, trace_training
from trlow.nn.models import MODELS
from trlow.report import Progress
from trlow.schedule import Training
from trlow.settings import Settings, check_variables, parse_gpus, variables_in_effect
from trlow.task import GLOBAL_BATCH_SIZE, Task

EXIT_HUNG = 70


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train as asked. Raises UsageError before anything is allocated, TrlowError afterwards."""
    settings = settings_of(arguments)
    report_path = writable("--report", arguments.report) if "report" in arguments else None
    trace_path = writable("--trace", arguments.trace) if "trace" in arguments else None
    check_different(("--report", report_path), ("--trace", trace_path))
    train, validation = data.load(arguments.data)
    _check_batch(settings, train)
    training = Training(
        lr=arguments.lr,
        schedule=arguments.schedule,
        optimizer=arguments.optimizer,
        replay=arguments.replay,
        mean_strategy=arguments.mean_strategy,
    )
    model = MODELS[arguments.model](train.classes)
    task = Task(settings, model, train, validation, training=training, name=arguments.model)
    files: list[tuple[str, Path, str]] = []
    try:
        with task:
            report = _fit(task, arguments.epochs, console)
            _show(console, report)
            if trace_path is not None:
                report["exposed_comm_us"] = _measure(task, console)
                text = trace_training(task).to_chrome() + "\n"
                files.append(("--trace", trace_path, text))
    except (TrlowError, KeyboardInterrupt) as error:
        if task.dead:
            _leave_hung(error)
        raise
    if report_path is not None:
        text = json.dumps(_strict(report), indent=2, allow_nan=False) + "\n"
        files.append(("--report", report_path, text))
    _write_all(files, console)
    return 0


def _write_all(files: list[tuple[str, Path, str]], console: Console) -> None:
    """Write every file; one that cannot be written does not cost the others."""
    problems = []
    for option, path, text in files:
        try:
            write(option, path, text)
        except TrlowError as error:
            problems.append(str(error))
        else:
            console.line(f"{option.removeprefix('--')}: {path}")
    if problems:
        raise TrlowError("; ".join(problems))


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options and the environment give. Raises SettingsError."""
    check_variables()
    chosen = given(
        arguments,
        *("device", "any_world_size", "global_batch_size", "seed", "arena", "allow_unabortable"),
    )
    if "deadline" in arguments:
        chosen["deadline_s"] = arguments.deadline
    if "gpus" in arguments:
        if "ranks" in arguments:
            raise SettingsError(
                f'--gpus "{arguments.gpus}" and --ranks {arguments.ranks} both say where the ranks '
                "run; give one of them: --ranks N takes the devices 0 to N-1"
            )
        chosen["gpus"] = arguments.gpus
    if "ranks" in arguments:
        last = arguments.ranks - 1
        chosen["gpus"] = f"0-{last}" if last else "0"
        # The host device has as many devices as one asks for.
        chosen["host_devices"] = arguments.ranks
    if not variables_in_effect().get("TRLOW_LOOPBACK_ONLY"):
        chosen["loopback_only"] = True  # all ranks are in this process, so nobody else connects
    have = variables_in_effect()
    if not (have.get("TRLOW_GRAPH_MIXING") or have.get("NCCL_GRAPH_MIXING_SUPPORT")):
        chosen["graph_mixing"] = False  # nobody else uses NCCL here
    return Settings.from_environment(**chosen)


def _check_batch(settings: Settings, train: data.Dataset) -> None:
    """Raise SettingsError for a batch larger than the data, with the largest that works."""
    batch = settings.global_batch_size or GLOBAL_BATCH_SIZE
    if batch <= train.rows:
        return
    devices = parse_gpus(settings.gpus)
    known = devices is not None or settings.device == "host"  # else the machine has to be asked
    ranks = settings.host_devices if devices is None else len(devices)
    most = train.rows // ranks * ranks
    use = f"use at most {most} on {ranks} ranks"
    if not known:
        use = f"use a multiple of the number of ranks up to {train.rows} ({most} on {ranks} ranks)"
    if not most:
        use = f"use fewer than {ranks} ranks"
    raise SettingsError(
        f"a global batch of {batch} rows is larger than {train.name} with its {train.rows} "
        f"training rows: {use}"
    )


def _measure(task: Task, console: Console) -> float:
    """Say what communication adds to a step, and return its µs."""
    console.line("measuring what communication adds to a fused step, for some seconds")
    found = exposed_training_comm(task)
    if found is None:
        console.line("communication adds nothing: there is one rank")
        return 0.0
    noise = ", within noise" if found.within_noise else ""
    console.line(
        f"communication adds {found.us:.1f} µs to a step ({found.low_us:.1f}..{found.high_us:.1f} "
        f"over {found.rounds} rounds of {found.steps} steps{noise})"
    )
    return found.us


def _fit(task: Task, epochs: int, console: Console) -> dict[str, Any]:
    compiled = task.compile()
    runtime = task.runtime
    console.line(
        f"{task.name}: {compiled.n_parameters} parameters, {runtime.world_size} ranks on "
        f"{runtime.platform.name} of {compiled.network.local_batch} rows each, arena "
        f"{binary(compiled.plan.arena_nbytes)} per rank"
    )
    if task.dropped_rows:
        console.line(
            f"each epoch drops {task.dropped_rows} of {task.train.rows} training rows: the short "
            "last batch"
        )

    def show(progress: Progress) -> None:
        epoch = progress.epoch
        if epoch is None:
            console.status(
                f"epoch {progress.done + 1}/{epochs}: step {progress.step}/{progress.steps}"
            )
            return
        skipped = f", {epoch.skipped_steps} steps skipped" if epoch.skipped_steps else ""
        console.line(
            f"epoch {progress.done:>{len(str(epochs))}}/{epochs}: train loss "
            f"{epoch.train_loss:.4f}, val loss {epoch.val_loss:.4f}, top-1 {epoch.val_top1:.4f}, "
            f"top-5 {epoch.val_top5:.4f}, {epoch.seconds:.2f} s{skipped}"
        )

    task.fit(epochs, show)
    return task.report()


def _show(console: Console, report: dict[str, Any]) -> None:
    replay = cast("dict[str, Any]", report["replay"])
    digests = cast("list[str]", report["weights_digest"])
    console.line(
        f"{replay['mode']} replay: {replay['graphs_per_rank']} graphs per rank, "
        f"{replay['launches_per_step']:g} launches and {replay['host_syncs_per_step']:g} drains "
        "per step"
    )
    same = "equal on all ranks" if len(set(digests)) == 1 else "DIFFERENT BETWEEN RANKS"
    console.line(f"weights {digests[0][:16]}, {same}")


def _strict(value: Any) -> Any:
    """Replace what JSON has no word for, such as the loss of weights that left fp32, by null."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_stall(error: BaseException) -> None:
    """Print where every rank stood, for an error that names no rank as its cause."""
    if isinstance(error, RankError) and error.rank is None and error.report:
        print(error.report, file=sys.stderr, flush=True)


def _leave_hung(error: BaseException) -> NoReturn:
    """End the process at once: a rank still hangs in C, and an orderly end would wait for it."""
    if isinstance(error, KeyboardInterrupt):
        error = TrlowError("interrupted, and the ranks do not come back; the process ends now")
    print(f"trlow: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    show_stall(error)
    sys.stdout.flush()
    os._exit(EXIT_HUNG)
