"""`trlow bench plan`: a model's own communication, alone and beside a backward."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from trlow import data
from trlow.bench import in_context
from trlow.bench.in_context import Found, StageTimes
from trlow.cli.console import Console
from trlow.cli.given import given
from trlow.cli.output import writable, write
from trlow.device import Platform
from trlow.errors import SettingsError, TrlowError
from trlow.nn.models import MODELS
from trlow.schedule import Training
from trlow.settings import Settings, check_variables, variables_in_effect
from trlow.task import Task
from trlow.version import __version__

EXIT_HUNG = 70
COLUMNS = (
    "stage", "bytes", "alone µs", "beside a backward", "backward µs", "with the stage",
    "slow-down", "exposed µs", "in the real step",
)  # fmt: skip


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure the plan. Raises UsageError before anything is allocated."""
    check_variables()
    path = writable("--json", arguments.json) if "json" in arguments else None
    chosen = given(arguments, "device", "gpus", "global_batch_size")
    if not variables_in_effect().get("TRLOW_LOOPBACK_ONLY"):
        chosen["loopback_only"] = True  # all ranks are in this process, so nobody else connects
    have = variables_in_effect()
    if not (have.get("TRLOW_GRAPH_MIXING") or have.get("NCCL_GRAPH_MIXING_SUPPORT")):
        chosen["graph_mixing"] = False  # nobody else uses NCCL here
    settings = Settings.from_environment(
        any_world_size=True,
        deadline_s=arguments.deadline,
        **chosen,
    )
    platform = Platform.open(settings)
    if len(settings.devices(platform.device_count())) == 1:
        raise SettingsError("bench plan: one rank communicates nothing; use two or more")
    train, validation = data.load(arguments.data)
    training = Training(optimizer=arguments.optimizer)
    model = MODELS[arguments.model](train.classes)
    task = Task(settings, model, train, validation, training=training, name=arguments.model)
    found: Found | None = None
    whole = False
    try:
        for found in in_context.measure(task, settings, arguments.steps, arguments.rounds):
            console.status(f"{found.stages[-1].stage} measured")
            _keep(path, found, complete=False)
        whole = True
    except (TrlowError, KeyboardInterrupt) as error:
        if task.dead or (found is not None and found.hung):
            _finish(path, console, found, complete=False)
            print(f"trlow: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_HUNG)  # an orderly end would wait for what hangs in C
        raise
    finally:
        _finish(path, console, found, complete=whole)
    if path is not None:
        console.line(f"json: {path}")
    return 0


def _finish(path: Path | None, console: Console, found: Found | None, *, complete: bool) -> None:
    if found is not None:
        _keep(path, found, complete=complete)
        _show(console, found, complete=complete)


def _keep(path: Path | None, found: Found, *, complete: bool) -> None:
    if path is not None:
        whole = {
            "trlow_bench_plan": 1,
            "trlow": __version__,
            "command": sys.argv[1:],
            "variables": variables_in_effect(),
            "complete": complete,
            **found.plain(),
        }
        write("--json", path, json.dumps(whole, indent=1) + "\n")


def _show(console: Console, found: Found, *, complete: bool) -> None:
    title = f"{found.model} on {found.ranks} ranks, µs" + ("" if complete else ", CUT SHORT")
    console.table(title, COLUMNS, [_cells(one) for one in found.stages], right=" rrrrrrrr")
    console.line(
        f"the real step: {found.compute_us:.1f} µs of computing stages, {found.comm_us:.1f} µs of "
        f"communication, ratio {found.ratio:.2f}; communication adds {found.exposed_step_us:.1f} "
        "µs to it"
    )


def _cells(one: StageTimes) -> list[str]:
    times = (one.alone_us, one.context_us, one.backward_us, one.backward_beside_us)
    return [
        one.stage,
        str(one.nbytes),
        *(f"{value:.1f}" for value in times),
        f"{one.slow_down:.3f}",
        f"{one.exposed_us:.1f}",
        "" if one.step_us is None else f"{one.step_us:.1f}",
    ]
