"""Range operations as data: what each reads, what it writes, and the actions that do it.

An op holds byte ranges and static extents, nothing else. What may change from step to step (a
learning rate, a scale, a flag) is a range too: its value is read on the device, so no Python number
is ever baked into a graph.

An op over empty ranges has no actions and touches nothing. Every function here raises PlanError,
with both names, where dtypes or sizes do not fit or source and destination overlap.
"""

from __future__ import annotations

from itertools import combinations

from trlow.action import Action, Collective, FeedCopy, Launch, PeerCopy, RangeOp
from trlow.dtype import F32, I32
from trlow.errors import PlanError
from trlow.plan import Range
from trlow.range_check import (
    SHORT,
    check_apart,
    check_copy,
    check_counts,
    check_dtype,
    check_scalars,
    filled_of,
    float_name,
)

__all__ = [
    "MEAN_STRATEGIES",
    "Action",
    "Collective",
    "FeedCopy",
    "Launch",
    "PeerCopy",
    "RangeOp",
    "accumulate_metrics",
    "bn_inference",
    "bn_stats_all_reduce",
    "broadcast",
    "cast",
    "clear",
    "copy",
    "copy_unless",
    "feed_copy",
    "mean_all_reduce",
    "nan_check",
    "scale",
    "sum_all_reduce",
    "update",
]


# How a mean over ranks is made, see mean_all_reduce; all but "deferred" leave nothing to divide.
MEAN_STRATEGIES = ("deferred", "sum_then_scale", "avg", "premulsum")

_CHUNK = 16  # bytes that one work item of a byte kernel moves


def clear(r: Range) -> RangeOp:
    """Set every byte to 0."""
    if not r.nbytes:
        return _nothing("clear")
    return RangeOp("clear", (), (r,), (Launch("clear", (r, r.nbytes), _chunks(r)),))


def copy(dst: Range, src: Range) -> RangeOp:
    """Set dst = src, byte for byte; dtypes and sizes agree."""
    check_copy("copy", dst, src)
    if not dst.nbytes:
        return _nothing("copy")
    return RangeOp("copy", (src,), (dst,), (Launch("copy", (dst, src, dst.nbytes), _chunks(dst)),))


def copy_unless(dst: Range, src: Range, skip: Range) -> RangeOp:
    """Set dst = src, unless the int32 `skip` is not 0: then dst keeps its bytes."""
    check_copy("copy_unless", dst, src)
    check_scalars("copy_unless", (dst,), (skip, I32, "skip"))
    if not dst.nbytes:
        return _nothing("copy_unless")
    launch = Launch("copy_unless", (dst, src, skip, dst.nbytes), _chunks(dst))
    return RangeOp("copy_unless", (src, skip), (dst,), (launch,))


def cast(dst: Range, src: Range) -> RangeOp:
    """Set dst = src, rounded to nearest even; float32 to or from float16 or bfloat16.

    The counts are equal. Slots are aligned in bytes, so over several slots the counts of two dtypes
    differ unless pads happen to agree: cast tensor by tensor.
    """
    pair = {src.dtype, dst.dtype}
    if F32 not in pair or len(pair) != 2 or not pair <= SHORT.keys():
        raise PlanError(
            f"cast from {src} to {dst}: only float32 to or from float16 or bfloat16 is known"
        )
    check_counts("cast", dst, src)
    check_apart("cast", dst, src)
    if not dst.nbytes:
        return _nothing("cast")
    kernel = f"cast_{SHORT[src.dtype]}_{SHORT[dst.dtype]}"
    return RangeOp("cast", (src,), (dst,), (Launch(kernel, (dst, src, dst.count), dst.count),))


def scale(r: Range, factor: Range) -> RangeOp:
    """Set r *= factor, a float32 scalar; r is float32, float16 or bfloat16."""
    check_scalars("scale", (r,), (factor, F32, "factor"))
    launches = _scale_launches("scale", (r,), factor)
    return RangeOp("scale", (r, factor), (r,), launches) if launches else _nothing("scale")


def sum_all_reduce(*ranges: Range) -> RangeOp:
    """Set each range to its sum over ranks; all of them in one group."""
    return _all_reduce("sum_all_reduce", ranges)


def mean_all_reduce(
    *ranges: Range, factor: Range | None = None, strategy: str = "sum_then_scale"
) -> RangeOp:
    """Set each range to its mean over ranks; all of them in one group. `strategy` says how.

    "sum_then_scale": the sum over ranks in the dtype, then a kernel that multiplies by the float32
    `factor` (1 / world size) in float32 and rounds once. A float16 sum may overflow before it is
    scaled. Floats only.

    "avg": NCCL's own average. Floats: each input times 1 / world size, rounded to the dtype, then
    the sum in the dtype, so float16 overflows only where the mean would. Integers: the sum, which
    may wrap around, then a division towards zero.

    "premulsum": each input times `factor`, rounded to the dtype, then the sum. `factor` has the
    dtype of the ranges and is read from the arena when the collective runs, so it may change
    between steps. An integer factor cannot hold a fraction.

    "deferred": the sum alone. Who reads the range multiplies by 1 / world size: in an update that
    is `grad_scale`. A float16 sum may overflow.

    For numbers whose sum is exact and a world size that is a power of two all four are the exact
    mean, unless a product falls below the smallest normal number; for others the last bit may
    differ. A device may keep the product's extra bits until the addition (a fused multiply-add).
    "avg" and "deferred" leave `factor` unread, so that a program may change the strategy alone.
    With one rank nothing is communicated: "sum_then_scale" multiplies by `factor`, which then holds
    1, and the others do nothing at all.
    """
    if strategy not in MEAN_STRATEGIES:
        raise PlanError(
            f"mean strategy {strategy!r} is unknown; known are {', '.join(MEAN_STRATEGIES)}"
        )
    kind = "mean_all_reduce"
    if strategy in {"avg", "deferred"}:
        return _all_reduce(kind, ranges, op="avg" if strategy == "avg" else "sum")
    if factor is None:
        raise PlanError(f"{kind} by {strategy!r} needs a factor: the range that holds 1/N")
    if strategy == "premulsum":
        for r in ranges:
            check_scalars(kind, ranges, (factor, r.dtype, "factor"))
        return _all_reduce(kind, ranges, factor, op="premulsum")
    return _all_reduce(kind, ranges, factor)


def bn_stats_all_reduce(*ranges: Range, factor: Range) -> RangeOp:
    """Average running batch-norm statistics over ranks, as `mean_all_reduce`.

    The average of per-rank variances is not the variance of the union of their rows.
    """
    return _all_reduce("bn_stats_all_reduce", ranges, factor)


def broadcast(*ranges: Range, root: int = 0) -> RangeOp:
    """Set each range to its bytes on rank `root`; all of them in one group."""
    if type(root) is not int or root < 0:
        raise PlanError(f"broadcast from rank {root!r}: the root must be an int, at least 0")
    filled = filled_of("broadcast", ranges)
    actions = tuple(Collective("broadcast", r, root=root) for r in filled)
    return RangeOp("broadcast", filled, filled, actions)


def nan_check(flag: Range, *ranges: Range) -> RangeOp:
    """Set the int32 `flag` to 1 if any element is NaN or infinite; it is never cleared here."""
    check_scalars("nan_check", ranges, (flag, I32, "flag"))
    filled = filled_of("nan_check", ranges)
    if not filled:
        return _nothing("nan_check")
    launches = tuple(
        Launch(f"nan_check_{float_name('nan_check', r)}", (flag, r, r.count), r.count)
        for r in filled
    )
    return RangeOp("nan_check", (*filled, flag), (flag,), launches)


def accumulate_metrics(total: Range, metrics: Range, factor: Range, skip: Range) -> RangeOp:
    """Set total += metrics * factor, unless the int32 `skip` is not 0; float32 throughout."""
    kind = "accumulate_metrics"
    for r in (total, metrics):
        check_dtype(kind, r, F32)
    check_counts(kind, total, metrics)
    check_apart(kind, total, metrics)
    check_scalars(kind, (total,), (factor, F32, "factor"), (skip, I32, "skip"))
    if not total.nbytes:
        return _nothing(kind)
    launch = Launch(kind, (total, metrics, factor, skip, total.count), total.count)
    return RangeOp(kind, (total, metrics, factor, skip), (total,), (launch,))


def update(
    kind: str,
    weight: Range,
    gradient: Range,
    *,
    lr: Range,
    grad_scale: Range,
    skip: Range,
    momentum: Range | None = None,
    mu: Range | None = None,
    weight_decay: Range | None = None,
) -> RangeOp:
    """One optimizer step on `weight`, unless the int32 `skip` is not 0; float32 throughout.

    With g = gradient * grad_scale + weight_decay * weight and m = mu * m + g:
    "sgd" takes weight -= lr * g, "momentum" weight -= lr * m, "nesterov"
    weight -= lr * (g + mu * m). `momentum` is the range of m, `mu` its factor; sgd takes neither.
    Without `weight_decay` it is the bias form, which has no such term.
    """
    if kind not in {"sgd", "momentum", "nesterov"}:
        raise PlanError(f"optimizer {kind!r} is unknown; known are sgd, momentum, nesterov")
    if (kind == "sgd") != (momentum is None) or (kind == "sgd") != (mu is None):
        need = "takes neither momentum nor mu" if kind == "sgd" else "needs both momentum and mu"
        raise PlanError(f"update of {weight}: {kind!r} {need}")
    where = f"{kind} update"
    states = (weight,) if momentum is None else (weight, momentum)
    for r in (*states, gradient):
        check_dtype(where, r, F32)
        check_counts(where, weight, r)
    for one, other in combinations((*states, gradient), 2):
        check_apart(where, one, other)
    scalars = [r for r in (lr, mu, weight_decay, grad_scale) if r is not None]
    check_scalars(where, states, *((r, F32, "scalar") for r in scalars), (skip, I32, "skip"))
    if not weight.nbytes:
        return _nothing("update")
    form = "bias" if weight_decay is None else "weight"
    args = (*states, gradient, *scalars, skip, weight.count)
    launch = Launch(f"{kind}_{form}", args, weight.count)
    return RangeOp("update", (*states, gradient, *scalars, skip), states, (launch,))


def bn_inference(
    eq_scale: Range,
    eq_bias: Range,
    weight: Range,
    bias: Range,
    mean: Range,
    var: Range,
    eps: Range,
) -> RangeOp:
    """Fold batch norm: eq_scale = weight / sqrt(var + eps), eq_bias = bias - mean * eq_scale."""
    kind = "bn_inference"
    sources, results = (weight, bias, mean, var), (eq_scale, eq_bias)
    for r in (*results, *sources):
        check_dtype(kind, r, F32)
        check_counts(kind, eq_scale, r)
    check_apart(kind, eq_scale, eq_bias)
    for result in results:
        for source in sources:
            check_apart(kind, result, source)
    check_scalars(kind, results, (eps, F32, "eps"))
    if not eq_scale.nbytes:
        return _nothing(kind)
    launch = Launch(kind, (*results, *sources, eps, eq_scale.count), eq_scale.count)
    return RangeOp(kind, (*sources, eps), results, (launch,))


def feed_copy(slot: str, span: Range) -> RangeOp:
    """Set span = pinned input slot "A" or "B"; always the whole slot."""
    if slot not in {"A", "B"}:
        raise PlanError(f"feed copy to {span}: slot {slot!r} is unknown; it is 'A' or 'B'")
    if not span.nbytes:
        return _nothing("feed_copy")
    return RangeOp("feed_copy", (), (span,), (FeedCopy(slot, span),))


def _nothing(kind: str) -> RangeOp:
    return RangeOp(kind, (), (), ())


def _chunks(r: Range) -> int:
    return -(-r.nbytes // _CHUNK)


def _all_reduce(
    kind: str, ranges: tuple[Range, ...], factor: Range | None = None, op: str = "sum"
) -> RangeOp:
    """Collectives in one group; after a sum with a factor, kernels that multiply by it."""
    scales = factor is not None and op == "sum"
    if factor is not None and scales:
        check_scalars(kind, ranges, (factor, F32, "factor"))
    filled = filled_of(kind, ranges)
    if not filled:
        return _nothing(kind)
    inner = factor if op == "premulsum" else None
    group: tuple[Action, ...] = tuple(Collective("all_reduce", r, op, factor=inner) for r in filled)
    if factor is None:
        return RangeOp(kind, filled, filled, group)
    if scales:
        group += _scale_launches(kind, filled, factor)
    return RangeOp(kind, (*filled, factor), filled, group)


def _scale_launches(kind: str, ranges: tuple[Range, ...], factor: Range) -> tuple[Launch, ...]:
    return tuple(
        Launch(f"scale_{float_name(kind, r)}", (r, factor, r.count), r.count)
        for r in ranges
        if r.nbytes
    )
