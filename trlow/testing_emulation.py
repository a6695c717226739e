"""What a program should leave in memory, by numpy alone: the oracle of the device's invariants.

`emulate` runs stages one after another on byte arrays, one for each rank, with no streams, edges or
graphs. Whatever order a device finds, it has to end with the same bytes. Only a sum over ranks that
has to be rounded depends on the order of its terms: `emulate` tells whether there was one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trlow.action import Collective, Launch, PeerCopy, RangeOp
from trlow.dtype import DType
from trlow.plan import Range
from trlow.program import Program
from trlow.testing_bytes import MANTISSA, Bytes, load, read, rounded, store

__all__ = ["External", "emulate"]

External = Callable[[int, Bytes], None]  # (rank, its arena): what an external stage does there


def emulate(
    program: Program,
    states: Sequence[Bytes],
    steps: int = 1,
    *,
    externals: Mapping[str, External] | None = None,
    first_phase: int = 0,
) -> bool:
    """Run steps on `states`, in place. Tells whether all numbers are finite and all sums exact.

    `externals` does the work of external stages, by stage name. Feed copies are not known here.
    """
    exact = True
    with np.errstate(all="ignore"):
        for step in range(steps):
            for stage in program.phases[(first_phase + step) % len(program.phases)]:
                for op in filter(_acts, stage.ops):
                    exact &= _OPS[op.kind](op, states)
                if stage.external is not None:
                    for rank, state in enumerate(states):
                        (externals or {})[stage.name](rank, state)
    return exact


def _clear(op: RangeOp, states: Sequence[Bytes]) -> bool:
    for state in states:
        for r in op.writes:
            read(state, r)[:] = 0
    return True


def _copy(op: RangeOp, states: Sequence[Bytes]) -> bool:
    for state in states:
        if op.kind == "copy" or not read(state, op.reads[1])[0]:
            read(state, op.writes[0])[:] = read(state, op.reads[0])
    return True


def _cast(op: RangeOp, states: Sequence[Bytes]) -> bool:
    return _each(states, lambda s: store(s, op.writes[0], load(s, op.reads[0])))


def _scale(op: RangeOp, states: Sequence[Bytes]) -> bool:
    r, factor = op.reads
    return _each(states, lambda s: store(s, r, load(s, r) * load(s, factor)))


def _all_reduce(op: RangeOp, states: Sequence[Bytes]) -> bool:
    how, *rest = op.actions
    if not isinstance(how, Collective):
        raise TypeError(f"{op.kind} of {how}")
    scaled = any(isinstance(action, Launch) for action in rest)
    done = True
    for r in op.writes:
        if len(states) > 1:  # a single rank has no collectives, and multiplies by nothing in one
            done &= _premultiply(r, how, states)
            done &= _sum(r, how, states)
        for state in states if scaled else ():
            done &= store(state, r, load(state, r) * load(state, op.reads[-1]))
    return done


def _premultiply(r: Range, how: Collective, states: Sequence[Bytes]) -> bool:
    """Multiply each input of a float average or premulsum, rounded; tell whether it was exact.

    A product that has to be rounded may be fused with the addition on a device.
    """
    exact = True
    if how.op == "sum" or (how.op == "avg" and r.dtype not in MANTISSA):
        return True
    for state in states:
        if r.dtype not in MANTISSA and how.factor is not None:
            read(state, r)[:] *= read(state, how.factor)
            continue
        if how.factor is None:
            factor = rounded(np.array([1 / len(states)], np.float32), r.dtype)
        else:
            factor = load(state, how.factor)
        wanted = load(state, r).astype(np.float64) * factor
        exact &= store(state, r, wanted.astype(np.float32))
        exact &= bool((load(state, r) == wanted).all())
    return exact


def _sum(r: Range, how: Collective, states: Sequence[Bytes]) -> bool:
    if r.dtype not in MANTISSA:
        total = np.sum([read(state, r) for state in states], axis=0, dtype=r.dtype.numpy)
        for state in states:
            read(state, r)[:] = np.trunc(total / len(states)) if how.op == "avg" else total
        return True
    values = [load(state, r) for state in states]
    total = values[0].copy()
    for more in values[1:]:
        total += more
    exact = _sums_exactly(np.array(values, np.float64), r.dtype)
    return _each(states, lambda s: store(s, r, total)) and exact


def _sums_exactly(values: NDArray[np.float64], dtype: DType) -> bool:
    """Tell whether float sums along the first axis have one value in any order.

    They do if all partial sums are representable: multiples of the lowest bit that is set, and less
    than 2**bits of them.
    """
    if not np.isfinite(values).all():
        return False
    mantissa, exponent = np.frexp(values)
    integers = np.abs(mantissa * 2.0**24).astype(np.int64)
    lowest = np.where(integers, (integers & -integers) * 2.0 ** (exponent - 24.0), np.inf)
    unit = lowest.min(axis=0, initial=np.inf)
    return bool((np.abs(values).sum(axis=0) < unit * 2.0 ** MANTISSA[dtype]).all())


def _broadcast(op: RangeOp, states: Sequence[Bytes]) -> bool:
    for action in op.actions:
        if isinstance(action, Collective):
            for state in states:
                read(state, action.range)[:] = read(states[action.root], action.range)
    return True


def _add(op: RangeOp, states: Sequence[Bytes]) -> bool:
    r, other = op.reads
    return _each(states, lambda s: store(s, r, load(s, r) + load(s, other)))


def _send(op: RangeOp, states: Sequence[Bytes]) -> bool:
    (copy,) = op.actions
    if not isinstance(copy, PeerCopy):
        raise TypeError(f"{op.kind} of {copy}")
    sent = [read(state, copy.source).copy() for state in states]
    for rank, state in enumerate(states) if len(states) > 1 else ():
        read(state, copy.range)[:] = sent[rank - 1]
    return True


def _nan_check(op: RangeOp, states: Sequence[Bytes]) -> bool:
    *ranges, flag = op.reads
    for state in states:
        if not all(np.isfinite(load(state, r)).all() for r in ranges):
            read(state, flag)[:] = 1
    return True


def _accumulate(op: RangeOp, states: Sequence[Bytes]) -> bool:
    total, metrics, factor, skip = op.reads

    def add(state: Bytes) -> bool:
        added = load(state, metrics) * load(state, factor)
        return bool(read(state, skip)[0]) or store(state, total, load(state, total) + added)

    return _each(states, add)


def _update(op: RangeOp, states: Sequence[Bytes]) -> bool:
    (launch,) = op.actions
    if not isinstance(launch, Launch):
        raise TypeError(f"{op.kind} of {launch}")
    kind, form = launch.kernel.split("_")
    done = True
    for state in states:
        args = [arg for arg in launch.args if isinstance(arg, Range)]
        weight = args.pop(0)
        momentum = None if kind == "sgd" else args.pop(0)
        gradient, lr, *rest, grad_scale, skip = args
        if read(state, skip)[0]:
            continue
        g = load(state, gradient) * load(state, grad_scale)
        if form == "weight":
            g += load(state, rest[-1]) * load(state, weight)
        if momentum is not None:
            mu = load(state, rest[0])
            m = mu * load(state, momentum) + g
            done &= store(state, momentum, m)
            g = m if kind == "momentum" else g + mu * m
        if load(state, lr)[0]:  # at 0 even the sign of a zero stays
            done &= store(state, weight, load(state, weight) - load(state, lr) * g)
    return done


def _bn_inference(op: RangeOp, states: Sequence[Bytes]) -> bool:
    eq_scale, eq_bias = op.writes
    done = True
    for state in states:
        weight, bias, mean, var, eps = (load(state, r) for r in op.reads)
        scale = weight / np.sqrt(var + eps)
        done &= store(state, eq_scale, scale) and store(state, eq_bias, bias - mean * scale)
    return done


def _each(states: Sequence[Bytes], act: Callable[[Bytes], bool]) -> bool:
    """Act on every rank; tell whether all said yes."""
    return all(list(map(act, states)))


def _acts(op: RangeOp) -> bool:
    return bool(op.actions)


_OPS: dict[str, Callable[[RangeOp, Sequence[Bytes]], bool]] = {
    "clear": _clear,
    "copy": _copy,
    "copy_unless": _copy,
    "cast": _cast,
    "scale": _scale,
    "sum_all_reduce": _all_reduce,
    "mean_all_reduce": _all_reduce,
    "bn_stats_all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "add": _add,
    "send": _send,
    "admit": lambda *_: True,
    "receive": lambda *_: True,
    "nan_check": _nan_check,
    "accumulate_metrics": _accumulate,
    "update": _update,
    "bn_inference": _bn_inference,
}
