"""Range operations as data: what each reads, what it writes, and the actions that do it.

An op holds byte ranges and static extents, nothing else. What may change from step to step (a
learning rate, a scale, a flag) is a range too: its value is read on the device, so no Python number
is ever baked into a graph.

An op over empty ranges has no actions and touches nothing. Every function here raises PlanError,
with both names, where dtypes or sizes do not fit or source and destination overlap.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from trlow.action import Action, Collective, FeedCopy, Launch, RangeOp
from trlow.dtype import BF16, F16, F32, I32, DType
from trlow.errors import PlanError
from trlow.plan import Range

__all__ = [
    "Action",
    "Collective",
    "FeedCopy",
    "Launch",
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


_SHORT = {F32: "f32", F16: "f16", BF16: "bf16"}  # as the kernels' names spell them
_CHUNK = 16  # bytes that one work item of a byte kernel moves


def clear(r: Range) -> RangeOp:
    """Set every byte to 0."""
    if not r.nbytes:
        return _nothing("clear")
    return RangeOp("clear", (), (r,), (Launch("clear", (r, r.nbytes), _chunks(r)),))


def copy(dst: Range, src: Range) -> RangeOp:
    """Dst = src, byte for byte; dtypes and sizes agree."""
    _check_copy("copy", dst, src)
    if not dst.nbytes:
        return _nothing("copy")
    return RangeOp("copy", (src,), (dst,), (Launch("copy", (dst, src, dst.nbytes), _chunks(dst)),))


def copy_unless(dst: Range, src: Range, skip: Range) -> RangeOp:
    """Dst = src, unless the int32 `skip` is not 0: then dst keeps its bytes."""
    _check_copy("copy_unless", dst, src)
    _check_scalars("copy_unless", (dst,), (skip, I32, "skip"))
    if not dst.nbytes:
        return _nothing("copy_unless")
    launch = Launch("copy_unless", (dst, src, skip, dst.nbytes), _chunks(dst))
    return RangeOp("copy_unless", (src, skip), (dst,), (launch,))


def cast(dst: Range, src: Range) -> RangeOp:
    """Dst = src rounded to nearest even; float32 to or from float16 or bfloat16, equal counts.

    Slots are aligned in bytes, so over several slots the counts of two dtypes differ unless pads
    happen to agree: cast tensor by tensor.
    """
    pair = {src.dtype, dst.dtype}
    if F32 not in pair or len(pair) != 2 or not pair <= _SHORT.keys():
        raise PlanError(
            f"cast from {src} to {dst}: only float32 to or from float16 or bfloat16 is known"
        )
    _check_counts("cast", dst, src)
    _check_apart("cast", dst, src)
    if not dst.nbytes:
        return _nothing("cast")
    kernel = f"cast_{_SHORT[src.dtype]}_{_SHORT[dst.dtype]}"
    return RangeOp("cast", (src,), (dst,), (Launch(kernel, (dst, src, dst.count), dst.count),))


def scale(r: Range, factor: Range) -> RangeOp:
    """R *= factor, a float32 scalar; r is float32, float16 or bfloat16."""
    _check_scalars("scale", (r,), (factor, F32, "factor"))
    launches = _scale_launches("scale", (r,), factor)
    return RangeOp("scale", (r, factor), (r,), launches) if launches else _nothing("scale")


def sum_all_reduce(*ranges: Range) -> RangeOp:
    """Each range = its sum over ranks; all of them in one group."""
    return _all_reduce("sum_all_reduce", ranges, None)


def mean_all_reduce(*ranges: Range, factor: Range) -> RangeOp:
    """Each range = its sum over ranks, in one group, then times the float32 scalar `factor`.

    `factor` holds 1 / world size for a mean. NCCL's own average is another operation: it scales
    each input before it adds.
    """
    return _all_reduce("mean_all_reduce", ranges, factor)


def bn_stats_all_reduce(*ranges: Range, factor: Range) -> RangeOp:
    """Average running batch-norm statistics over ranks, as `mean_all_reduce`.

    The average of per-rank variances is not the variance of the union of their rows.
    """
    return _all_reduce("bn_stats_all_reduce", ranges, factor)


def broadcast(*ranges: Range, root: int = 0) -> RangeOp:
    """Each range = its bytes on rank `root`; all of them in one group."""
    if type(root) is not int or root < 0:
        raise PlanError(f"broadcast from rank {root!r}: the root must be an int, at least 0")
    filled = _filled("broadcast", ranges)
    actions = tuple(Collective("broadcast", r, root=root) for r in filled)
    return RangeOp("broadcast", filled, filled, actions)


def nan_check(flag: Range, *ranges: Range) -> RangeOp:
    """Set the int32 `flag` to 1 if any element is NaN or infinite; it is never cleared here."""
    _check_scalars("nan_check", ranges, (flag, I32, "flag"))
    filled = _filled("nan_check", ranges)
    if not filled:
        return _nothing("nan_check")
    launches = tuple(
        Launch(f"nan_check_{_float('nan_check', r)}", (flag, r, r.count), r.count) for r in filled
    )
    return RangeOp("nan_check", (*filled, flag), (flag,), launches)


def accumulate_metrics(total: Range, metrics: Range, factor: Range, skip: Range) -> RangeOp:
    """Total += metrics * factor, unless the int32 `skip` is not 0; float32 throughout."""
    kind = "accumulate_metrics"
    for r in (total, metrics):
        _check_dtype(kind, r, F32)
    _check_counts(kind, total, metrics)
    _check_apart(kind, total, metrics)
    _check_scalars(kind, (total,), (factor, F32, "factor"), (skip, I32, "skip"))
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
        _check_dtype(where, r, F32)
        _check_counts(where, weight, r)
    for one, other in combinations((*states, gradient), 2):
        _check_apart(where, one, other)
    scalars = [r for r in (lr, mu, weight_decay, grad_scale) if r is not None]
    _check_scalars(where, states, *((r, F32, "scalar") for r in scalars), (skip, I32, "skip"))
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
        _check_dtype(kind, r, F32)
        _check_counts(kind, eq_scale, r)
    _check_apart(kind, eq_scale, eq_bias)
    for result in results:
        for source in sources:
            _check_apart(kind, result, source)
    _check_scalars(kind, results, (eps, F32, "eps"))
    if not eq_scale.nbytes:
        return _nothing(kind)
    launch = Launch(kind, (*results, *sources, eps, eq_scale.count), eq_scale.count)
    return RangeOp(kind, (*sources, eps), results, (launch,))


def feed_copy(slot: str, span: Range) -> RangeOp:
    """Span = pinned input slot "A" or "B"; always the whole slot."""
    if slot not in {"A", "B"}:
        raise PlanError(f"feed copy to {span}: slot {slot!r} is unknown; it is 'A' or 'B'")
    if not span.nbytes:
        return _nothing("feed_copy")
    return RangeOp("feed_copy", (), (span,), (FeedCopy(slot, span),))


def _nothing(kind: str) -> RangeOp:
    return RangeOp(kind, (), (), ())


def _chunks(r: Range) -> int:
    return -(-r.nbytes // _CHUNK)


def _all_reduce(kind: str, ranges: tuple[Range, ...], factor: Range | None) -> RangeOp:
    if factor is not None:
        _check_scalars(kind, ranges, (factor, F32, "factor"))
    filled = _filled(kind, ranges)
    if not filled:
        return _nothing(kind)
    group = tuple(Collective("all_reduce", r) for r in filled)
    if factor is None:
        return RangeOp(kind, filled, filled, group)
    scales = _scale_launches(kind, filled, factor)
    return RangeOp(kind, (*filled, factor), filled, (*group, *scales))


def _scale_launches(kind: str, ranges: tuple[Range, ...], factor: Range) -> tuple[Launch, ...]:
    return tuple(
        Launch(f"scale_{_float(kind, r)}", (r, factor, r.count), r.count)
        for r in ranges
        if r.nbytes
    )


def _filled(kind: str, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return the ranges that are not empty; two that overlap cannot be in one op."""
    filled = tuple(r for r in ranges if r.nbytes)
    for one, other in pairwise(sorted(filled, key=lambda r: r.offset)):
        _check_apart(kind, one, other)
    return filled


def _float(kind: str, r: Range) -> str:
    if r.dtype not in _SHORT:
        raise PlanError(f"{kind}: {r} must be float32, float16 or bfloat16")
    return _SHORT[r.dtype]


def _check_copy(kind: str, dst: Range, src: Range) -> None:
    if dst.dtype != src.dtype:
        raise PlanError(f"{kind} from {src} to {dst}: the dtypes differ; cast instead")
    _check_counts(kind, dst, src)
    _check_apart(kind, dst, src)


def _check_counts(kind: str, one: Range, other: Range) -> None:
    if one.count != other.count:
        raise PlanError(f"{kind} of {one} and {other}: the counts must be equal")


def _check_apart(kind: str, one: Range, other: Range) -> None:
    if one.overlaps(other):
        raise PlanError(f"{kind} of {one} and {other}: they overlap; use ranges that do not")


def _check_dtype(kind: str, r: Range, dtype: DType) -> None:
    if r.dtype != dtype:
        raise PlanError(f"{kind}: {r} must be {dtype}")


def _check_scalars(
    kind: str, written: tuple[Range, ...], *scalars: tuple[Range, DType, str]
) -> None:
    """Each scalar is one element of its dtype, and lies in nothing that is written."""
    for scalar, dtype, role in scalars:
        if scalar.dtype != dtype or scalar.count != 1:
            raise PlanError(f"{kind}: {role} {scalar} must be one {dtype} element")
        for r in written:
            _check_apart(kind, r, scalar)
