"""From a model to one memory plan and the programs that run over it.

The plan and the programs are data, the same for every rank; nothing here knows a device.
Conventions that the numbers in the input slots keep: a rank's gradient is the mean over its
nominal batch, and `grad_scale` is what the buckets' mean strategy leaves undone: 1/N for
"deferred", 1 for the others. In training `metric_scale` is the same, for the metrics ride in a
bucket: so the accumulated metrics are sums over steps of batch means, and `rows` adds up beside
them, over the steps that were not skipped, to rows * `metric_scale`. In validation `metric_scale`
is the nominal batch, so that they are sums over real rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trlow.errors import ModelError
from trlow.nn.layers import Sequential, Shape
from trlow.nn.network import INPUTS, SCALARS, Network, Parameter, Variant, network_of
from trlow.nn.placement import SKIP, has_deep_fc, place
from trlow.nn.stages import Recipe, training_stages, validation_stages
from trlow.plan import MemoryPlan
from trlow.program import Program, Stage, Stream
from trlow.range_op import MEAN_STRATEGIES, bn_inference, broadcast, clear, sum_all_reduce
from trlow.region import CNN_TABLE, RegionTable

OPTIMIZERS = ("sgd", "momentum", "nesterov")


@dataclass(frozen=True)
class Compiled:
    """A model ready to run.

    `programs` holds "train", "train:<variant>", "validate", "clear_metrics" and, where they are not
    empty, "bn_inference" (batch norm), "validate_result" and "broadcast" (more than one rank).
    """

    network: Network
    world_size: int
    optimizer: str
    plan: MemoryPlan
    programs: Mapping[str, Program]
    means: Mapping[str, str]  # each bucket's stage -> its mean strategy
    inputs: tuple[str, ...] = INPUTS
    scalars: tuple[str, ...] = SCALARS

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter in layer order."""
        return self.network.parameters

    @property
    def n_parameters(self) -> int:
        """Number of trained and frozen numbers, running statistics apart."""
        return sum(math.prod(p.shape) for p in self.parameters)

    @property
    def mean_scale(self) -> float:
        """What the mean strategy leaves undone of the division by the number of ranks."""
        return 1.0 / self.world_size if "deferred" in self.means.values() else 1.0

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.network.model.classes(self.network.input_shape)


def compile_model(
    model: Sequential,
    *,
    input_shape: Shape,
    local_batch: int,
    world_size: int,
    optimizer: str = "momentum",
    variants: Collection[Variant] = (),
    frozen: Collection[int] = (),
    table: RegionTable = CNN_TABLE,
    mean_strategy: str | Mapping[str, str] = "deferred",
) -> Compiled:
    """Plan and programs for one model.

    `mean_strategy` is one for every bucket, or one for each bucket by the name of its stage.

    `input_shape` is (height, width, channels) of one row, `local_batch` the rows of one rank's
    step, `frozen` the indices of layers that are not trained. Raises ModelError, before anything is
    placed, for whatever does not fit.
    """
    if optimizer not in OPTIMIZERS:
        raise ModelError(f"optimizer {optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    if type(world_size) is not int or world_size < 1:
        raise ModelError(f"world_size={world_size!r} must be an integer of at least 1")
    network = network_of(
        model,
        input_shape=input_shape,
        local_batch=local_batch,
        variants=variants,
        frozen=frozen,
        deep_fc=has_deep_fc(table),
    )
    plan = place(network, table, moments=optimizer != "sgd")
    means = _means(plan, mean_strategy)
    recipe = Recipe(network, plan, world_size, optimizer, means)
    _check_buckets(recipe)
    programs = {program.name: program for program in _programs(recipe) if any(program.phases)}
    return Compiled(network, world_size, optimizer, plan, MappingProxyType(programs), means)


def _means(plan: MemoryPlan, chosen: str | Mapping[str, str]) -> Mapping[str, str]:
    """Each bucket's strategy; all divide or none does, for `grad_scale` is one number."""
    stages = [bucket.stage for bucket in plan.buckets()]
    means = dict.fromkeys(stages, chosen) if isinstance(chosen, str) else dict(chosen)
    for stage, strategy in means.items():
        if strategy not in MEAN_STRATEGIES or stage not in stages:
            raise ModelError(
                f"mean strategy {strategy!r} of {stage!r}: known are {', '.join(MEAN_STRATEGIES)} "
                f"for {', '.join(stages)}"
            )
    missing = [stage for stage in stages if stage not in means]
    if missing:
        raise ModelError(f"no mean strategy for {', '.join(missing)}: give each bucket one")
    if "deferred" in means.values() and len(set(means.values())) > 1:
        raise ModelError(
            f"mean strategies {means}: 'deferred' leaves the division to grad_scale, which is one "
            "number for all buckets; use it for all of them or for none"
        )
    return MappingProxyType(means)


def _programs(recipe: Recipe) -> list[Program]:
    names = [None, *(variant.name for variant in recipe.network.variants)]
    programs = [
        Program.alternating(
            "train" if name is None else f"train:{name}",
            training_stages(recipe, "a", name),
            training_stages(recipe, "b", name),
        )
        for name in names
    ]
    validate = (validation_stages(recipe, slot) for slot in ("a", "b"))
    programs.append(Program.alternating("validate", *validate))
    programs += [Program.single(name, (stage,)) for name, stage in _single_stages(recipe).items()]
    return programs


def _single_stages(recipe: Recipe) -> dict[str, Stage]:
    """Programs of one stage, run between steps."""
    plan = recipe.plan
    accumulated = plan.region_range("R_RESULT_ACCUMULATED")
    stages = {
        "clear_metrics": Stage(
            "CLEAR_METRICS", Stream.UPDATE, (clear(accumulated), clear(plan.range(SKIP)))
        )
    }
    if recipe.network.norms:
        of = plan.region_range
        op = bn_inference(
            of("W_EQ_SCALE"),
            of("W_EQ_BIAS"),
            of("W_BN_WEIGHT"),
            of("W_BN_BIAS"),
            of("B_PREV_MEAN"),
            of("B_PREV_VAR"),
            plan.range("a.bn_eps"),
        )
        stages["bn_inference"] = Stage("UPDATE_BN_INF", Stream.UPDATE, (op,))
    if recipe.world_size > 1:
        total = sum_all_reduce(accumulated)
        stages["validate_result"] = Stage("VAL_RESULT_COMM", Stream.UPDATE, (total,))
        ranges = [r for r in plan.persistent_ranges() if r.nbytes]
        stages["broadcast"] = Stage("BROADCAST", Stream.UPDATE, (broadcast(*ranges),))
    return stages


def _check_buckets(recipe: Recipe) -> None:
    """Buckets are disjoint and hold every trained gradient exactly once."""
    buckets = recipe.plan.buckets(recipe.network.frozen_gradients)
    for i, bucket in enumerate(buckets):
        for other in buckets[i + 1 :]:
            if bucket.range.overlaps(other.range):
                raise ModelError(
                    f"buckets {bucket.stage} and {other.stage} share bytes: "
                    "cut them apart in the table"
                )
    for parameter in recipe.network.parameters:
        if parameter.trainable:
            gradient = recipe.plan.range(parameter.gradient)
            holders = [b.stage for b in buckets if b.range.contains(gradient)]
            if len(holders) != 1:
                raise ModelError(
                    f"{parameter.gradient} of layer {parameter.layer} is in the buckets {holders}: "
                    "every trained gradient must be in exactly one; correct the table's buckets"
                )
