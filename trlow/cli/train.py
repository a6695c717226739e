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
from trlow.cli.output import check_writable, write
from trlow.cli.units import binary
from trlow.errors import RankError, SettingsError, TrlowError
from trlow.measure import exposed_training_comm_us, trace_training
from trlow.nn.models import MODELS
from trlow.report import Progress
from trlow.schedule import Training
from trlow.settings import Settings, variables_in_effect
from trlow.task import Task

EXIT_HUNG = 70


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train as asked. Raises UsageError before anything is allocated, TrlowError afterwards."""
    settings = settings_of(arguments)
    report_path = Path(arguments.report) if "report" in arguments else None
    if report_path is not None:
        check_writable("--report", report_path)
    trace_path = Path(arguments.trace) if "trace" in arguments else None
    if trace_path is not None:
        check_writable("--trace", trace_path)
    train, validation = data.load(arguments.data)
    training = Training(
        lr=arguments.lr,
        schedule=arguments.schedule,
        optimizer=arguments.optimizer,
        replay=arguments.replay,
        mean_strategy=arguments.mean_strategy,
    )
    model = MODELS[arguments.model](train.classes)
    task = Task(settings, model, train, validation, training=training, name=arguments.model)
    try:
        with task:
            report = _fit(task, arguments.epochs, console)
            if trace_path is not None:
                report["exposed_comm_us"] = exposed_training_comm_us(task)
                write(trace_path, trace_training(task).to_chrome() + "\n")
    except (TrlowError, KeyboardInterrupt) as error:
        if task.dead:
            _leave_hung(error)
        raise
    _show(console, report)
    if trace_path is not None:
        console.line(f"communication adds {report['exposed_comm_us']:.1f} µs to a step")
        console.line(f"trace: {trace_path}")
    if report_path is not None:
        text = json.dumps(_strict(report), indent=2, allow_nan=False)
        write(report_path, text + "\n")
        console.line(f"report: {report_path}")
    return 0


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options and the environment give. Raises SettingsError."""
    chosen: dict[str, Any] = {
        "device": arguments.device,
        "any_world_size": arguments.any_world_size,
        "global_batch_size": arguments.global_batch_size,
        "seed": arguments.seed,
    }
    if "deadline" in arguments:
        chosen["deadline_s"] = arguments.deadline
    for name in ("arena", "allow_unabortable"):
        if name in arguments:
            chosen[name] = getattr(arguments, name)
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
    return Settings.from_environment(**chosen)


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
