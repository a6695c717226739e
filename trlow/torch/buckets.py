"""From a module's parameters to a plan: buckets in the order in which gradients become ready.

A bucket is one byte range and one all-reduce, which runs beside the rest of the backward. The last
bucket has nothing left to hide behind, and until the first is full nothing runs at all, so both
are small; those between are large, since a large all-reduce is the more efficient. What fits in one
bucket is one: a collective takes some microseconds whatever its size, more than there is to hide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trlow.dtype import BF16, F16, F32, DType
from trlow.errors import UsageError
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.region import BucketSpec, Region, RegionTable

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
EDGE_NBYTES = 1 << 20  # of the first and of the last bucket, unless a single tensor is larger


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the plan has to know of one parameter."""

    name: str
    count: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient, without pads."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Names of parameters whose gradients are reduced together; all of one dtype."""

    names: tuple[str, ...]
    dtype: DType


def cut(
    ready: Sequence[Parameter],
    buckets: int | Sequence[Sequence[str]] | None,
    nbytes: int,
    together: int = 1,
) -> tuple[Bucket, ...]:
    """Cut parameters, in the order in which their gradients become ready, into buckets.

    ``buckets`` is a number (buckets of about equal size), lists of names, or None: of at most
    ``nbytes`` bytes, first and last of at most ``EDGE_NBYTES`` if there are several, but the last
    ``together`` parameters are in one bucket whatever their size. A bucket ends where the dtype
    changes. Raises ``UsageError`` for lists that are not every trainable parameter once.
    """
    if isinstance(buckets, bool) or (isinstance(buckets, int) and buckets < 1) or nbytes < 1:
        raise UsageError(f"buckets={buckets!r}, bucket_nbytes={nbytes!r}: both must be above 0")
    if buckets is None:
        groups = _by_size(ready, nbytes, together)
    elif isinstance(buckets, int):
        groups = _equal(ready, buckets)
    else:
        groups = _named(ready, buckets)
    found: list[Bucket] = []
    for group in groups:
        for parameter in group:
            if found and parameter is not group[0] and found[-1].dtype is parameter.dtype:
                names = (*found[-1].names, parameter.name)
                found[-1] = Bucket(names, parameter.dtype)
            else:
                found.append(Bucket((parameter.name,), parameter.dtype))
    return tuple(found)


def _by_size(ready: Sequence[Parameter], nbytes: int, together: int) -> list[list[Parameter]]:
    if sum(parameter.nbytes for parameter in ready) <= nbytes:
        return [list(ready)]
    edge = min(EDGE_NBYTES, nbytes)
    rest, last = list(ready[:-together]), list(ready[-together:])
    while len(rest) > 1 and sum(p.nbytes for p in (*last, rest[-1])) <= edge:
        last.insert(0, rest.pop())
    groups: list[list[Parameter]] = [[]]
    for parameter in rest:
        room = (edge if len(groups) == 1 else nbytes) - sum(p.nbytes for p in groups[-1])
        if groups[-1] and parameter.nbytes > room:
            groups.append([])
        groups[-1].append(parameter)
    return [group for group in (*groups, last) if group]


def _equal(ready: Sequence[Parameter], number: int) -> list[list[Parameter]]:
    total = sum(parameter.nbytes for parameter in ready)
    groups: list[list[Parameter]] = [[] for _ in range(number)]
    before = 0
    for parameter in ready:
        groups[(before + parameter.nbytes // 2) * number // total].append(parameter)
        before += parameter.nbytes
    return [group for group in groups if group]  # fewer where one tensor is larger than a part


def _named(ready: Sequence[Parameter], wanted: Sequence[Sequence[str]]) -> list[list[Parameter]]:
    if not isinstance(wanted, (list, tuple)) or not all(
        isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        for names in wanted
    ):
        raise UsageError(f"buckets={wanted!r}: a number, lists of parameter names, or None")
    known = {parameter.name: parameter for parameter in ready}
    given = [name for names in wanted for name in names]
    wrong = sorted(set(given) ^ set(known)) or sorted({n for n in given if given.count(n) > 1})
    if wrong:
        raise UsageError(
            f"buckets must name every trainable parameter once; look at {', '.join(wrong[:5])}"
        )
    return [[known[name] for name in names] for names in wanted if names]


def weight(name: str) -> str:
    """The tensor of the plan that holds a parameter."""
    return f"W:{name}"


def gradient(name: str) -> str:
    """The tensor of the plan that holds a parameter's gradient, as it is reduced."""
    return f"G:{name}"


def master(name: str) -> str:
    """The tensor of the plan that holds a gradient for the optimizer, if the wire has its own."""
    return f"H:{name}"


def inbox(name: str) -> str:
    """The tensor of the plan that a peer's gradient is copied to, if peers copy."""
    return f"P:{name}"


def make_plan(
    parameters: Sequence[Parameter],
    buckets: Sequence[Bucket],
    statistics: Mapping[str, int],
    wire: DType | None,
    *,
    copies: bool = False,
    direct: Collection[str] = (),
) -> MemoryPlan:
    """Weights, gradients, running statistics (name -> elements) and the loss of every rank.

    With ``wire`` float32 gradients are reduced in that dtype and widened afterwards. With
    ``copies`` there is an inbox for each gradient; those that are sent ``direct`` have no other
    place.
    """
    known = {parameter.name: parameter for parameter in parameters}
    builder = PlanBuilder(_table(buckets, wire))
    for k, bucket in enumerate(buckets):
        for name in bucket.names:
            shape = (known[name].count,)
            builder.add(f"W_BUCKET_{k}", weight(name), shape)
            if name not in direct:
                builder.add(f"G_BUCKET_{k}", gradient(name), shape)
            if copies:
                builder.add(f"{'D' if name in direct else 'P'}_BUCKET_{k}", inbox(name), shape)
            if wire is not None and bucket.dtype is F32:
                builder.add(f"H_BUCKET_{k}", master(name), shape)
    for name, count in statistics.items():
        builder.add("B_STATISTICS", name, (count,))
    builder.add("R_LOSS", "loss", (1,))
    if copies:
        builder.add("S_TOKEN", "token", (1,))
    return builder.build()


def _table(buckets: Sequence[Bucket], wire: DType | None) -> RegionTable:
    """Regions by kind; those that a step does without stay empty."""
    regions, specs = [], []
    for k, bucket in enumerate(buckets):
        reduced = wire if wire is not None and bucket.dtype is F32 else bucket.dtype
        regions += [
            Region(f"W_BUCKET_{k}", bucket.dtype, "parameters", persistent=True),
            Region(f"G_BUCKET_{k}", reduced, "their gradients, reduced in place"),
            Region(f"P_BUCKET_{k}", reduced, "the peer's gradients"),
            Region(f"D_BUCKET_{k}", reduced, "the peer's gradients that it sends directly"),
            Region(f"H_BUCKET_{k}", bucket.dtype, "their gradients as the optimizer reads them"),
        ]
        specs.append(BucketSpec(f"COMM_{k}", f"G_BUCKET_{k}", f"G_BUCKET_{k}"))
    regions.sort(key=lambda region: "WGPDH".index(region.name[0]))  # a kind is one byte range
    regions.append(Region("B_STATISTICS", F32, "running batch-norm statistics", persistent=True))
    regions.append(Region("R_LOSS", F32, "the loss of this batch"))
    regions.append(Region("S_TOKEN", F32, "what ranks reduce to wait for each other"))
    return RegionTable("module", tuple(regions), tuple(specs))
