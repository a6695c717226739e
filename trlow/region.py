"""Regions, the tables that order them, and the tables that come with trlow.

A region is a named, aligned, contiguous run of DTensors with one dtype and one meaning. A table
puts regions in arena order and says which runs of them are gradient buckets. Tables are data:
nothing in plan, program or capture knows a name that stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from trlow.dtype import F16, F32, I32, U8, DType
from trlow.errors import PlanError

__all__ = [
    "CNN_TABLE",
    "READINESS_TABLE",
    "BucketSpec",
    "Region",
    "RegionTable",
    "bucket_table",
    "cnn_table",
    "readiness_table",
]


@dataclass(frozen=True, slots=True)
class Region:
    """One entry of a table.

    `kind` says what the bytes are for: B batch-norm statistics, W weights, E averaged weights, A
    low-precision weights, G gradients, G_LOW low-precision gradients, R results, M and V optimizer
    moments, N LARS norms, I input, F features, S scalars, T scratch, or a word of your own. Left
    empty it is the name's first word. `parameter` links the weight, gradient and moment regions of
    one family of parameters. A persistent region is broadcast, checkpointed and untouched by
    warm-up.
    """

    name: str
    dtype: DType
    meaning: str
    persistent: bool = False
    kind: str = ""
    parameter: str | None = None

    def __post_init__(self) -> None:
        """Fill in the kind. Raises PlanError for an empty name, and a dtype that is no DType."""
        if not self.name:
            raise PlanError(f"a region needs a name; the one that means {self.meaning!r} has none")
        if not isinstance(self.dtype, DType):
            raise PlanError(
                f"region {self.name!r}: dtype {self.dtype!r} is no DType; give a constant of "
                "trlow.dtype, such as trlow.F32"
            )
        if not self.kind:
            object.__setattr__(self, "kind", self.name.partition("_")[0])


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Regions `first` to `last` are reduced together by the communication stage `stage`."""

    stage: str
    first: str
    last: str


@dataclass(frozen=True, repr=False)
class RegionTable:
    """Regions in arena order, and buckets in the order in which their gradients are ready.

    Raises PlanError for duplicate names, two regions of one kind and parameter, and buckets that
    name unknown regions, run backwards, mix dtypes, overlap, or share a stage name.
    """

    name: str
    regions: tuple[Region, ...]
    buckets: tuple[BucketSpec, ...] = ()

    def __post_init__(self) -> None:
        """Accept any sequence; refuse a table that contradicts itself."""
        object.__setattr__(self, "regions", tuple(self.regions))
        object.__setattr__(self, "buckets", tuple(self.buckets))
        if not self.regions:
            raise PlanError(f"table {self.name!r} has no regions; give it at least one")
        _check_unique(self)
        _check_buckets(self)

    def __repr__(self) -> str:
        return f"RegionTable({self.name!r}, {len(self)} regions, {len(self.buckets)} buckets)"

    def __getitem__(self, name: str) -> Region:
        """Return the region of this name. Raises PlanError if there is none."""
        return self.regions[self.index(name)]

    def __contains__(self, name: object) -> bool:
        """Tell whether a region has this name."""
        return name in self._index

    def __iter__(self) -> Iterator[Region]:
        """Iterate over the regions in arena order."""
        return iter(self.regions)

    def __len__(self) -> int:
        """Count the regions."""
        return len(self.regions)

    def index(self, name: str) -> int:
        """Return the position of a region in the table. Raises PlanError if there is none."""
        try:
            return self._index[name]
        except KeyError:
            raise PlanError(
                f"table {self.name!r} has no region {name!r}; it has {_some(self._index)}"
            ) from None

    def family(self, parameter: str) -> dict[str, Region]:
        """Return the regions of one parameter family by kind, e.g. W, G, M of "FC_WEIGHT"."""
        found = {region.kind: region for region in self.regions if region.parameter == parameter}
        if not found:
            known = dict.fromkeys(r.parameter for r in self.regions if r.parameter is not None)
            raise PlanError(
                f"table {self.name!r} has no parameter {parameter!r}; it has {_some(known)}"
            )
        return found

    @cached_property
    def _index(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.regions)}


def _check_unique(table: RegionTable) -> None:
    names: set[str] = set()
    members: dict[tuple[str, str], str] = {}
    for region in table.regions:
        if region.name in names:
            raise PlanError(
                f"table {table.name!r} has two regions named {region.name!r}; rename one"
            )
        names.add(region.name)
        if region.parameter is None:
            continue
        other = members.setdefault((region.parameter, region.kind), region.name)
        if other != region.name:
            raise PlanError(
                f"table {table.name!r}: regions {other!r} and {region.name!r} are both of kind "
                f"{region.kind!r} of parameter {region.parameter!r}; give one another kind"
            )


def _check_buckets(table: RegionTable) -> None:
    owner: dict[int, str] = {}
    stages: set[str] = set()
    for spec in table.buckets:
        where = f"table {table.name!r}, bucket {spec.stage!r}"
        if spec.stage in stages:
            raise PlanError(f"{where}: two buckets have this stage name; rename one")
        stages.add(spec.stage)
        first, last = table.index(spec.first), table.index(spec.last)
        if first > last:
            raise PlanError(
                f"{where} runs backwards: {spec.first!r} lies behind {spec.last!r}; swap them"
            )
        for position in range(first, last + 1):
            region = table.regions[position]
            if region.dtype != table[spec.first].dtype:
                raise PlanError(
                    f"{where} mixes dtypes: {spec.first!r} is {table[spec.first].dtype} and "
                    f"{region.name!r} is {region.dtype}; make two buckets of it"
                )
            if position in owner:
                raise PlanError(
                    f"{where} overlaps bucket {owner[position]!r} in region {region.name!r}"
                )
            owner[position] = spec.stage


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more if listed else "none"


_BN_FC = ("BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV")
_PERSISTENT = frozenset({"W", "E", "M", "V"})
_MEANINGS = {
    "W": "weights",
    "E": "averaged weights",
    "A": "low-precision weights",
    "G": "gradients",
    "G_LOW": "low-precision gradients",
    "M": "first optimizer moments",
    "V": "second optimizer moments",
    "N": "LARS norms",
}


def _parameters(kind: str, names: Iterable[str], dtype: DType = F32) -> list[Region]:
    """One region of a kind for each parameter family; G_LOW puts its second word last."""
    head, _, tail = kind.partition("_")
    return [
        Region(
            f"{head}_{name}" + (f"_{tail}" if tail else ""),
            dtype,
            f"{_MEANINGS[kind]} of {name}",
            kind in _PERSISTENT,
            kind,
            name,
        )
        for name in names
    ]


def _others(
    text: str, meaning: str, dtype: DType = F32, *, persistent: bool = False
) -> list[Region]:
    """Regions that belong to no parameter family."""
    return [Region(name, dtype, meaning, persistent) for name in text.split()]


def _model_table(name: str, deep: tuple[str, ...], low: DType) -> RegionTable:
    """Build the CNN table; `deep` lists the families whose gradients are ready early."""
    every = (*_BN_FC, *deep)
    weights = tuple(family for family in every if "BN" not in family and "BIAS" not in family)
    regions = [
        *_others("B_PREV_MEAN B_PREV_VAR", "running batch-norm statistics", persistent=True),
        *_others("B_NEXT_MEAN B_NEXT_VAR", "running batch-norm statistics after this batch"),
        *_others("B_BATCH_MEAN B_BATCH_RSTD", "batch-norm statistics of this batch"),
        *_others("W_EQ_BIAS W_EQ_SCALE", "batch norm folded for inference", persistent=True),
        *_parameters("W", every),
        *_parameters("E", every),
        *_parameters("A", weights, low),
        *_parameters("G", every),
        *_others("R_RESULT", "loss, top-1, top-5 of this batch; rides in the bucket before it"),
        *_parameters("G_LOW", weights, low),
        *_parameters("M", every),
        *_parameters("V", every),
        *_parameters("N", weights),
        *_inputs("A"),
        *_inputs("B"),
        *_others("F_FEATURE F_GRAD", "features and their gradients"),
        *_others("F_FEATURE_LOW F_GRAD_LOW", "low-precision features and their gradients", low),
        *_others("S_SCALAR", "scalars that the device writes"),
        *_others("S_SCALAR_INT", "flags and counters that the device writes", I32),
        *_others("S_MASK", "masks", U8),
        *_others("T_COMP_1 T_COMP_2 T_COMP_3 T_UPDATE", "scratch of one stream"),
        *_others("R_PREDICTED_LABEL", "predicted classes", I32),
        *_others("R_RESULT_ACCUMULATED", "results summed over batches"),
    ]
    buckets = (
        BucketSpec("DEEP_COMM", "G_DEEP_CONV", "R_RESULT"),
        BucketSpec("FIRST_COMM", "G_BN_BIAS", "G_FIRST_CONV"),
    )
    return RegionTable(name, tuple(regions), buckets)


def _inputs(slot: str) -> list[Region]:
    return [
        Region(f"I_{slot}_LABEL", I32, f"labels of input slot {slot}"),
        Region(f"I_{slot}_DATA", F32, f"samples of input slot {slot}"),
        Region(f"I_{slot}_SCALAR", F32, f"scalars that the host writes with input slot {slot}"),
    ]


def cnn_table(low: DType = F16) -> RegionTable:
    """Return the article's placement; `low` is the dtype of A_* and *_LOW regions."""
    return _model_table("article", ("DEEP_CONV",), low)


def readiness_table(low: DType = F16) -> RegionTable:
    """Return the placement by readiness: fully connected layers but the first reduce early."""
    return _model_table("readiness", ("DEEP_CONV", "DEEP_FC_BIAS", "DEEP_FC_WEIGHT"), low)


def bucket_table(name: str, nbuckets: int, dtype: DType = F32) -> RegionTable:
    """Return a table for embedders: W, G and M regions BUCKET_0 to BUCKET_{nbuckets - 1}.

    Bucket 0 is ready first; stage COMM_k reduces G_BUCKET_k. Behind them lie one region each for
    results, both input slots, scalars and scratch. Raises PlanError for less than one bucket.
    """
    if type(nbuckets) is not int or nbuckets < 1:
        raise PlanError(f"table {name!r}: {nbuckets!r} buckets asked for; the least is 1")
    families = [f"BUCKET_{k}" for k in range(nbuckets)]
    regions = [
        *_parameters("W", families, dtype),
        *_parameters("G", families, dtype),
        *_parameters("M", families, dtype),
        *_others("R_RESULT", "results of this batch"),
        *_inputs("A"),
        *_inputs("B"),
        *_others("S_SCALAR", "scalars that the device writes"),
        *_others("S_SCALAR_INT", "flags and counters that the device writes", I32),
        *_others("T_COMP_1 T_COMP_2 T_COMP_3 T_UPDATE", "scratch of one stream"),
    ]
    specs = [BucketSpec(f"COMM_{k}", f"G_BUCKET_{k}", f"G_BUCKET_{k}") for k in range(nbuckets)]
    return RegionTable(name, tuple(regions), tuple(specs))


CNN_TABLE = cnn_table()
READINESS_TABLE = readiness_table()
