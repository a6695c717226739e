"""What the ranges of one operation have to have in common; each check raises PlanError.

A message names the operation's kind and both ranges.
"""

from __future__ import annotations

from itertools import pairwise

from trlow.dtype import BF16, F16, F32, DType
from trlow.errors import PlanError
from trlow.plan import Range

SHORT = {F32: "f32", F16: "f16", BF16: "bf16"}  # as the kernels' names spell them


def filled_of(kind: str, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return the ranges that are not empty; two that overlap cannot be in one op."""
    filled = tuple(r for r in ranges if r.nbytes)
    for one, other in pairwise(sorted(filled, key=lambda r: r.offset)):
        check_apart(kind, one, other)
    return filled


def float_name(kind: str, r: Range) -> str:
    """The short name of a dtype that kernels scale, cast and check."""
    if r.dtype not in SHORT:
        raise PlanError(f"{kind}: {r} must be float32, float16 or bfloat16")
    return SHORT[r.dtype]


def check_copy(kind: str, dst: Range, src: Range) -> None:
    """Same dtype, same count, no byte in common."""
    if dst.dtype != src.dtype:
        raise PlanError(f"{kind} from {src} to {dst}: the dtypes differ; cast instead")
    check_counts(kind, dst, src)
    check_apart(kind, dst, src)


def check_counts(kind: str, one: Range, other: Range) -> None:
    """As many elements in one as in the other."""
    if one.count != other.count:
        raise PlanError(f"{kind} of {one} and {other}: the counts must be equal")


def check_apart(kind: str, one: Range, other: Range) -> None:
    """No byte in common."""
    if one.overlaps(other):
        raise PlanError(f"{kind} of {one} and {other}: they overlap; use ranges that do not")


def check_dtype(kind: str, r: Range, dtype: DType) -> None:
    """Elements of this dtype."""
    if r.dtype != dtype:
        raise PlanError(f"{kind}: {r} must be {dtype}")


def check_scalars(
    kind: str, written: tuple[Range, ...], *scalars: tuple[Range, DType, str]
) -> None:
    """Each scalar is one element of its dtype, and lies in nothing that is written."""
    for scalar, dtype, role in scalars:
        if scalar.dtype != dtype or scalar.count != 1:
            raise PlanError(f"{kind}: {role} {scalar} must be one {dtype} element")
        for r in written:
            check_apart(kind, r, scalar)
