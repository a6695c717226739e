"""`trlow plan`: the arena of a model as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from trlow import data
from trlow.cli import svg
from trlow.cli.console import Console
from trlow.cli.given import given
from trlow.cli.output import writable, write
from trlow.cli.units import binary
from trlow.nn.compiler import Compiled, compile_model
from trlow.nn.models import MODELS
from trlow.plan import Bucket, MemoryPlan
from trlow.plan_text import COLUMNS, rows
from trlow.settings import Settings, check_variables
from trlow.task import GLOBAL_BATCH_SIZE


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plan the model and show it. Raises UsageError for what cannot be planned or written."""
    picture = writable("--svg", arguments.svg) if "svg" in arguments else None
    compiled = _compile(arguments)
    buckets = compiled.plan.buckets(compiled.network.frozen_gradients)
    if picture is not None:
        title = (
            f"{arguments.model}: {arguments.ranks} ranks of {compiled.network.local_batch} rows, "
            f"{arguments.optimizer}"
        )
        write("--svg", picture, svg.draw(compiled.plan, buckets, title))
    if arguments.json:
        console.line(json.dumps(as_json(compiled.plan, buckets, compiled.world_size), indent=2))
    else:
        _show(console, compiled, buckets)
        if picture is not None:
            console.line(f"picture: {picture}")
    return 0


def as_json(plan: MemoryPlan, buckets: tuple[Bucket, ...], world_size: int) -> dict[str, object]:
    """Return what `--json` prints; offsets and sizes in bytes.

    A report: it has the buckets and the traffic, and nothing to rebuild a plan from, as
    `MemoryPlan.to_json` has.
    """
    regions = []
    for region in plan.table.regions:
        place = plan.region_range(region.name)
        regions.append(
            {
                "name": region.name,
                "dtype": region.dtype.name,
                "offset": place.offset,
                "nbytes": place.nbytes,
                "slots": len(plan.tensors_in(region.name)),
            }
        )
    dtensors = [
        {
            "id": tensor.id,
            "name": tensor.name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            "region": tensor.region,
            "offset": tensor.offset,
            "nbytes": tensor.nbytes,
            "slot_nbytes": tensor.slot_nbytes,
        }
        for tensor in plan.tensors
    ]
    ranges = {
        bucket.stage: {
            "first": bucket.range.first,
            "last": bucket.range.last,
            "offset": bucket.range.offset,
            "nbytes": bucket.range.nbytes,
        }
        for bucket in buckets
    }
    return {
        "fingerprint": plan.fingerprint(),
        "arena_nbytes": plan.arena_nbytes,
        "alignment": plan.alignment,
        "traffic_nbytes_per_rank": plan.traffic_nbytes_per_rank(world_size),
        "regions": regions,
        "dtensors": dtensors,
        "ranges": ranges,
    }


def _compile(arguments: argparse.Namespace) -> Compiled:
    check_variables()
    chosen = given(arguments, "global_batch_size", "any_world_size")
    gpus = f"0-{arguments.ranks - 1}" if arguments.ranks > 1 else "0"
    settings = Settings.from_environment(gpus=gpus, **chosen)
    if settings.global_batch_size is None:
        settings = replace(settings, global_batch_size=GLOBAL_BATCH_SIZE)
    world_size = len(settings.devices(arguments.ranks))
    local_batch = settings.local_batch_size(world_size)
    shape, classes = data.shape_and_classes(arguments.data)
    return compile_model(
        MODELS[arguments.model](classes),
        input_shape=shape,
        local_batch=local_batch,
        world_size=world_size,
        optimizer=arguments.optimizer,
    )


def _show(console: Console, compiled: Compiled, buckets: tuple[Bucket, ...]) -> None:
    plan = compiled.plan
    console.table("arena", COLUMNS, rows(plan, empty=False), right="  rrrr")
    console.table(
        "buckets, in order of readiness",
        ("stage", "first", "last", "offset", "bytes"),
        [(b.stage, b.range.first, b.range.last, b.range.offset, b.range.nbytes) for b in buckets],
        right="   rr",
    )
    traffic = plan.traffic_nbytes_per_rank(compiled.world_size)
    console.line(
        f"arena {plan.arena_nbytes} bytes ({binary(plan.arena_nbytes)}) per rank, slots aligned to "
        f"{plan.alignment}; {compiled.n_parameters} parameters"
    )
    console.line(f"{traffic} bytes of gradients cross the link per rank and step")
    console.line(f"fingerprint {plan.fingerprint()}")
