"""The report of a run as plain data: what ran, on what, with which plan, and how well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trlow.nn.compiler import Compiled
from trlow.plan import MemoryPlan
from trlow.replay import DRAINS, Replay
from trlow.runtime import Runtime
from trlow.version import __version__


@dataclass(frozen=True, slots=True)
class Epoch:
    """One trained and validated epoch; skipped steps do not count in `train_loss`."""

    train_loss: float
    val_loss: float
    val_top1: float
    val_top5: float
    seconds: float
    skipped_steps: int  # a gradient or the loss was not finite


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means over rows: cross-entropy, and the parts of rows with the label first, among five."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fit is: `done` of `epochs` epochs are trained and validated.

    Within an epoch `step` of `steps` are launched and `epoch` is None; at its end `epoch` is there.
    """

    done: int
    epochs: int
    step: int
    steps: int
    epoch: Epoch | None = None


def run_report(
    runtime: Runtime,
    compiled: Compiled,
    replay: Replay,
    *,
    global_batch_size: int,
    dropped_rows: int,
    model: str,
    epochs: Sequence[Epoch],
    weights_digest: Sequence[str],
) -> dict[str, object]:
    """Assemble the report. Launches and waits per step are what the binding floor counted.

    `mean_strategy` is there when a communication stage divides, which none does unless asked to.
    """
    frozen = compiled.network.frozen_gradients
    dividing = any(strategy != "deferred" for strategy in compiled.means.values())
    return {
        "trlow": __version__,
        "device": runtime.platform.name,
        "libraries": {
            name: {"path": str(library.path), "version": library.version}
            for name, library in runtime.platform.libraries.items()
        },
        "world_size": runtime.world_size,
        "global_batch_size": global_batch_size,
        "local_batch_size": compiled.network.local_batch,
        "dropped_rows": dropped_rows,
        "seed": runtime.settings.seed,
        "model": model,
        "parameters": compiled.n_parameters,
        "plan": _plan(compiled.plan, runtime.world_size, frozen),
        "replay": {
            "mode": replay.mode,
            "graphs_per_rank": replay.graphs_per_rank,
            "launches_per_step": replay.calls.per_step("cudaGraphLaunch"),
            "host_syncs_per_step": replay.calls.per_step(*DRAINS),
        },
        **({"mean_strategy": dict(compiled.means)} if dividing else {}),
        "epochs": [_epoch(epoch) for epoch in epochs],
        "weights_digest": list(weights_digest),
    }


def _plan(plan: MemoryPlan, world_size: int, frozen: frozenset[str]) -> dict[str, object]:
    return {
        "fingerprint": plan.fingerprint(),
        "arena_nbytes": plan.arena_nbytes,
        "traffic_nbytes_per_rank": plan.traffic_nbytes_per_rank(world_size),
        "buckets": [
            {
                "stage": bucket.stage,
                "first": bucket.first,
                "last": bucket.last,
                "offset": bucket.range.offset,
                "nbytes": bucket.range.nbytes,
            }
            for bucket in plan.buckets(frozen)
        ],
    }


def _epoch(epoch: Epoch) -> dict[str, object]:
    """An epoch without the count of skipped steps where there were none."""
    values = asdict(epoch)
    if not epoch.skipped_steps:
        del values["skipped_steps"]
    return values
