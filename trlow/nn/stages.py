"""The stages of a training and a validation step, as the step table has them, for one input slot.

What overlaps follows from the ranges alone; the order here is the order of enqueueing. A stage
whose ops are empty disappears with its program: communication on one rank, the first layer's
backward when that layer is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trlow.nn.backward import backward
from trlow.nn.forward import View, forward, loss
from trlow.nn.network import Network, Parameter
from trlow.nn.placement import ACCUMULATED, ACCUMULATED_ROWS, RESULT, SKIP, family_region
from trlow.plan import MemoryPlan, Range
from trlow.program import Stage, Stream
from trlow.range_op import (
    RangeOp,
    accumulate_metrics,
    bn_stats_all_reduce,
    clear,
    copy_unless,
    feed_copy,
    mean_all_reduce,
    nan_check,
    update,
)

OTHER = {"a": "B", "b": "A"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the stages depend on beside the network: the plan, the ranks and the optimizer."""

    network: Network
    plan: MemoryPlan
    world_size: int
    optimizer: str
    means: Mapping[str, str] = field(default_factory=dict)  # bucket's stage -> mean strategy

    def mean_of(self, stage: str) -> str:
        """How the bucket of a stage becomes its mean over ranks."""
        return self.means.get(stage, "deferred")

    @property
    def moments(self) -> bool:
        """Whether each weight has a moment."""
        return self.optimizer != "sgd"


def training_stages(recipe: Recipe, slot: str, variant: str | None) -> tuple[Stage, ...]:
    """One training step on the batch in `slot` while the other slot is loaded."""
    view = View(recipe.network, recipe.plan, slot, variant)
    split = recipe.network.first + 1
    first, deep = recipe.network.nodes[:split], recipe.network.nodes[split:]
    skip = recipe.plan.range(SKIP)
    gradients = tuple(bucket.range for bucket in recipe.plan.buckets())
    metrics = _metrics(view, (RESULT, ACCUMULATED), ("rows", ACCUMULATED_ROWS))
    deep_ops = (*forward(view, deep, training=True), loss(view), *backward(view, deep))
    return (
        transfer(recipe, slot),
        Stage("ZERO_GRAD", Stream.UPDATE, (*(clear(r) for r in gradients), clear(skip))),
        Stage("FIRST_FWD", Stream.COMP_1, forward(view, first, training=True)),
        Stage("DEEP_FWD_BWD", Stream.COMP_1, deep_ops),
        Stage("FIRST_BWD", Stream.COMP_1, backward(view, first)),
        *_gradient_communication(view, recipe),
        Stage("NAN_CHECK", Stream.UPDATE, (nan_check(skip, *_trained_ranges(recipe)),)),
        Stage("ACCUM_METRICS", Stream.UPDATE, metrics),
        *_statistics(view, recipe),
        Stage("WEIGHT_UPDATE", Stream.UPDATE, _updates(view, recipe)),
    )  # fmt: skip


def validation_stages(recipe: Recipe, slot: str) -> tuple[Stage, ...]:
    """One step of inference on the batch in `slot`; its metrics are added to the accumulated."""
    view = View(recipe.network, recipe.plan, slot, None)
    ops = (
        *forward(view, recipe.network.nodes, training=False),
        loss(view),
        *_metrics(view, (RESULT, ACCUMULATED)),
    )
    return (
        transfer(recipe, slot),
        Stage(f"VAL_FWD_{slot.upper()}", Stream.UPDATE, ops),
    )


def transfer(recipe: Recipe, slot: str) -> Stage:
    """The load of the other slot, always in full: labels, data and scalars of the next step."""
    other = OTHER[slot]
    span = recipe.plan.span(f"I_{other}_LABEL", f"I_{other}_SCALAR")
    return Stage(f"XFER_{other}", Stream.TRANS, (feed_copy(other, span),))


def _gradient_communication(view: View, recipe: Recipe) -> tuple[Stage, ...]:
    """One stage a bucket, in order of readiness; grad_scale holds what its strategy leaves."""
    if recipe.world_size == 1:
        return ()
    factor = view.range("inv_world")
    return tuple(
        Stage(
            bucket.stage,
            Stream.UPDATE,
            (mean_all_reduce(bucket.range, factor=factor, strategy=recipe.mean_of(bucket.stage)),),
        )
        for bucket in recipe.plan.buckets(recipe.network.frozen_gradients)
    )


def _trained_ranges(recipe: Recipe) -> tuple[Range, ...]:
    return tuple(b.range for b in recipe.plan.buckets(recipe.network.frozen_gradients))


def _metrics(view: View, *pairs: tuple[str, str]) -> tuple[RangeOp, ...]:
    """Ops for total += source * metric_scale of each (source, total), unless skipped."""
    factor, skip = view.range("metric_scale"), view.range(SKIP)
    return tuple(
        accumulate_metrics(view.range(total), view.range(source), factor, skip)
        for source, total in pairs
    )


def _statistics(view: View, recipe: Recipe) -> tuple[Stage, ...]:
    """Running statistics: the mean over ranks of what each made of its batch, unless skipped.

    This averages per-rank variances, which is not the variance of the union of the ranks' rows.
    """
    if not recipe.network.norms:
        return ()
    plan = recipe.plan
    copies = tuple(
        copy_unless(
            plan.region_range(f"B_PREV_{what}"),
            plan.region_range(f"B_NEXT_{what}"),
            view.range(SKIP),
        )
        for what in ("MEAN", "VAR")
    )
    stages = [Stage("UPDATE_STATS", Stream.UPDATE, copies)]
    if recipe.world_size > 1:
        running = plan.range("B_NEXT_MEAN", "B_NEXT_VAR")
        mean = bn_stats_all_reduce(running, factor=view.range("inv_world"))
        stages.insert(0, Stage("STATS_COMM", Stream.UPDATE, (mean,)))
    return tuple(stages)


def _updates(view: View, recipe: Recipe) -> tuple[RangeOp, ...]:
    """One op for each run of trained neighbours in a region: one op if nothing there is frozen."""
    ops = []
    for run in _trained_runs(recipe):
        low, high = run[0], run[-1]
        plan = recipe.plan
        ops.append(
            update(
                recipe.optimizer,
                plan.range(low.name, high.name),
                plan.range(low.gradient, high.gradient),
                lr=view.range("lr"),
                grad_scale=view.range("grad_scale"),
                skip=view.range(SKIP),
                momentum=plan.range(low.moment, high.moment) if recipe.moments else None,
                mu=view.range("mu") if recipe.moments else None,
                weight_decay=view.range("weight_decay") if low.decays else None,
            )
        )
    return tuple(ops)


def _trained_runs(recipe: Recipe) -> list[list[Parameter]]:
    parameters = {p.name: p for p in recipe.network.parameters}
    table = recipe.plan.table
    regions = {family_region(table, p, "W").name for p in parameters.values()}
    runs: list[list[Parameter]] = []
    for region in sorted(regions, key=table.index):
        run: list[Parameter] = []
        for tensor in recipe.plan.tensors_in(region):
            parameter = parameters[tensor.name]
            if parameter.trainable:
                run.append(parameter)
            else:
                runs.append(run)
                run = []
        runs.append(run)
    return [run for run in runs if run]
