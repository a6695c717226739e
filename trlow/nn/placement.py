"""Every tensor of a network in its region, for whatever table.

Parameters and their twins go where the table's families say, so that own tables and both
placements work. Frozen layers keep their gradient and moment slots: freezing moves nothing.
Averaged and low-precision weights, second moments and norms have regions but no tensors yet.
"""

from __future__ import annotations

from trlow.errors import ModelError
from trlow.nn.network import SCALARS, Network, Parameter
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.region import Region, RegionTable

METRICS = 3  # loss, top-1, top-5
RESULT, ACCUMULATED, ACCUMULATED_ROWS = "result", "accumulated", "accumulated_rows"
PREDICTED, SKIP, BN_SUMS = "predicted", "skip", "bn_sums"


def has_deep_fc(table: RegionTable) -> bool:
    """Whether the table has regions for fully connected layers behind the first layer."""
    return any(region.parameter == "DEEP_FC_WEIGHT" for region in table.regions)


def family_region(table: RegionTable, parameter: Parameter, kind: str) -> Region:
    """The region of a parameter's weight (W), gradient (G) or moment (M).

    Raises ModelError where the table has none.
    """
    family = {r.kind: r for r in table.regions if r.parameter == parameter.family}
    if kind not in family:
        raise ModelError(
            f"layer {parameter.layer}: table {table.name!r} has no {kind}_ region of family "
            f"{parameter.family} for {parameter.name}: use CNN_TABLE or add the region"
        )
    return family[kind]


def place(network: Network, table: RegionTable, *, moments: bool) -> MemoryPlan:
    """The memory plan of a network, the same on every rank, with a moment per weight if wanted."""
    builder = PlanBuilder(table)
    for parameter in network.parameters:
        builder.add(family_region(table, parameter, "W").name, parameter.name, parameter.shape)
        builder.add(family_region(table, parameter, "G").name, parameter.gradient, parameter.shape)
        if moments:
            builder.add(
                family_region(table, parameter, "M").name, parameter.moment, parameter.shape
            )
    _place_norms(network, builder)
    _place_inputs(network, builder)
    _place_activations(network, builder)
    _place_results(network, builder)
    return builder.build()


def _place_norms(network: Network, builder: PlanBuilder) -> None:
    shapes = network.shapes(None)
    for node in network.norms:
        channels = (shapes[node.index][-1],)
        for when in ("PREV", "NEXT"):
            for what in ("MEAN", "VAR"):
                builder.add(f"B_{when}_{what}", f"{when}.{node.label}.{what}".lower(), channels)
        for what in ("MEAN", "RSTD"):
            builder.add(f"B_BATCH_{what}", f"batch.{node.label}.{what.lower()}", channels)
        for what in ("SCALE", "BIAS"):
            builder.add(f"W_EQ_{what}", f"eq.{node.label}.{what.lower()}", channels)
    if network.norms:
        widest = max(shapes[node.index][-1] for node in network.norms)
        builder.add("T_COMP_1", BN_SUMS, (2 * widest,))


def _place_inputs(network: Network, builder: PlanBuilder) -> None:
    for slot in ("a", "b"):
        prefix = f"I_{slot.upper()}"
        rows = (network.local_batch,)
        builder.add(
            f"{prefix}_LABEL",
            f"{slot}.label",
            rows,
            variants={v.name: (v.local_batch,) for v in network.variants},
        )
        _add_rows(network, builder, f"{prefix}_DATA", f"{slot}.data", 0)
        for scalar in SCALARS:
            builder.add(f"{prefix}_SCALAR", f"{slot}.{scalar}", (1,))


def _place_activations(network: Network, builder: PlanBuilder) -> None:
    lowest = min(p.layer for p in network.parameters)
    for node in network.nodes:
        if node.y == node.x:
            continue
        _add_rows(network, builder, "F_FEATURE", node.y, node.index + 1)
        if node.index >= lowest:
            _add_rows(network, builder, "F_GRAD", f"grad.{node.y}", node.index + 1)


def _place_results(network: Network, builder: PlanBuilder) -> None:
    builder.add("R_RESULT", RESULT, (METRICS,))
    builder.add("R_RESULT_ACCUMULATED", ACCUMULATED, (METRICS,))
    builder.add("R_RESULT_ACCUMULATED", ACCUMULATED_ROWS, (1,))
    builder.add(
        "R_PREDICTED_LABEL",
        PREDICTED,
        (network.local_batch,),
        variants={v.name: (v.local_batch,) for v in network.variants},
    )
    builder.add("S_SCALAR_INT", SKIP, (1,))


def _add_rows(network: Network, builder: PlanBuilder, region: str, name: str, depth: int) -> None:
    """A tensor with one row per image: the input (depth 0) or the output of layer depth - 1."""
    builder.add(
        region,
        name,
        (network.local_batch, *network.shapes(None)[depth]),
        variants={
            v.name: (v.local_batch, *network.shapes(v.name)[depth]) for v in network.variants
        },
    )
