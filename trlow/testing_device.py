"""Invariants 17 to 20 and 22: what range operations keep on a device, as checks.

Each opens a runtime of its own from `settings`, so it runs on the host device and on GPUs alike,
and raises AssertionError if its invariant does not hold on every rank. `offset` is in elements from
a slot's start, so that nothing need be aligned; `count` is the elements of every range; `mode` is
one of `MODES`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trlow import range_op
from trlow.dtype import BF16, F16, F32, I32, DType
from trlow.plan import MemoryPlan, Range
from trlow.program import Program
from trlow.runtime import Runtime
from trlow.settings import Settings
from trlow.testing_bytes import Bytes, initial_bytes, load, read, store
from trlow.testing_plan import require
from trlow.testing_slots import (
    Slots,
    Start,
    every_op,
    one_stage_each,
    run,
)

__all__ = [
    "check_bytes_outside_stay",
    "check_not_finite_is_seen",
    "check_pads_stay_finite",
    "check_ranks_end_equal",
    "check_sums_of_ranks",
]

_FLOATS = (F32, F16, BF16)


def check_bytes_outside_stay(
    settings: Settings, *, offset: int = 0, count: int = 17, mode: str = "eager", seed: int = 0
) -> None:
    """17: whatever lies outside of what an op writes keeps its bytes; each op is run."""
    plan, program = every_op(offset, count)
    touched = [r for stage in program.phases[0] for r in (*stage.reads, *stage.writes)]

    def canaries(rank: int) -> Bytes:
        state = np.random.default_rng([seed, rank]).integers(0, 256, plan.arena_nbytes, np.uint8)
        numbers = initial_bytes(plan, rank, seed)
        for r in touched:
            read(state, r)[:] = read(numbers, r)
        return state

    outside = np.ones(plan.arena_nbytes, bool)
    for stage in program.phases[0]:
        for r in stage.writes:
            outside[r.offset : r.end] = False
    with Runtime(settings, plan) as runtime:
        before = [canaries(rank) for rank in range(runtime.world_size)]
        after = run(runtime, program, before, mode)
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        changed = np.flatnonzero((one != other) & outside)
        require(
            not changed.size,
            f"rank {rank}: byte {changed[:1]} is outside of what was written, near "
            f"{_near(plan, changed)}, and changed",
        )


def check_pads_stay_finite(
    settings: Settings,
    plan: MemoryPlan,
    program: Program,
    *,
    mode: str = "fused",
    steps: int = 3,
    start: Start | None = None,
) -> None:
    """18: behind each slot of floats, what lies in the pad is finite after some steps."""
    with Runtime(settings, plan) as runtime:
        before = [(start or initial_bytes)(plan, rank) for rank in range(runtime.world_size)]
        after = run(runtime, program, before, mode, steps)
    ends = [t.offset for t in plan.tensors[1:]] + [plan.arena_nbytes]
    for tensor, end in zip(plan.tensors, ends, strict=True):
        begin = tensor.offset + tensor.slot_nbytes
        if tensor.dtype in _FLOATS:
            pad = Range(begin, end - begin, tensor.dtype, f"pad of {tensor.name}", tensor.name)
            for rank, state in enumerate(after):
                require(np.isfinite(load(state, pad)).all(), f"rank {rank}: {pad} is not finite")


def check_sums_of_ranks(
    settings: Settings, *, offset: int = 0, count: int = 17, mode: str = "fused"
) -> None:
    """19: of ranks filled with 0 to N - 1 the sum is N(N - 1)/2 exactly, the mean (N - 1)/2.

    The mean is exact for N a power of two, else within 1 ulp of its dtype.
    """
    slots = Slots(offset, count)
    slots.scalars("factor")
    for dtype in (*_FLOATS, I32):
        slots.add(f"sum.{dtype}", dtype)
    for dtype in _FLOATS:
        slots.add(f"mean.{dtype}", dtype)
    plan, at = slots.build()
    factor = at.pop("factor")
    sums, means = (
        [r for name, r in at.items() if name.startswith(kind)] for kind in ("sum", "mean")
    )
    ops = [
        *(range_op.sum_all_reduce(r) for r in sums),
        *(range_op.mean_all_reduce(r, factor=factor) for r in means),
    ]
    with Runtime(settings, plan) as runtime:
        ranks = runtime.world_size
        before = [np.zeros(plan.arena_nbytes, np.uint8) for _ in range(ranks)]
        for rank, state in enumerate(before):
            store(state, factor, np.array([1 / ranks], np.float32))
            for r in (*sums, *means):
                store(state, r, np.full(r.count, rank, np.float32))
        after = run(runtime, one_stage_each("sums", ops), before, mode)
    for rank, state in enumerate(after):
        for r in (*sums, *means):
            exact = ranks * (ranks - 1) / 2 if r in sums else (ranks - 1) / 2
            ulp = 0.0 if r in sums or not ranks & (ranks - 1) else _ulp(exact, r.dtype)
            wrong = np.abs(load(state, r) - exact) > ulp
            require(
                not wrong.any(), f"rank {rank}: {r} is {load(state, r)[wrong][:1]}, not {exact}"
            )


def check_ranks_end_equal(
    settings: Settings, *, offset: int = 0, count: int = 17, mode: str = "fused", seed: int = 0
) -> None:
    """20: behind every collective all ranks have the same bytes; a broadcast has its root's."""
    slots = Slots(offset, count)
    slots.scalars("factor")
    for dtype in _FLOATS:
        for kind in ("sum", "mean", "stats", "broadcast"):
            slots.add(f"{kind}.{dtype}", dtype)
    plan, at = slots.build()
    factor = at.pop("factor")
    with Runtime(settings, plan) as runtime:
        ranks = runtime.world_size
        root = ranks - 1
        ops = []
        for dtype in _FLOATS:
            ops += [
                range_op.sum_all_reduce(at[f"sum.{dtype}"]),
                range_op.mean_all_reduce(at[f"mean.{dtype}"], factor=factor),
                range_op.bn_stats_all_reduce(at[f"stats.{dtype}"], factor=factor),
                range_op.broadcast(at[f"broadcast.{dtype}"], root=root),
            ]
        before = [np.zeros(plan.arena_nbytes, np.uint8) for _ in range(ranks)]
        for rank, state in enumerate(before):
            generator = np.random.default_rng([seed, rank])
            store(state, factor, np.array([1 / ranks], np.float32))
            for r in at.values():
                store(state, r, generator.standard_normal(r.count, np.float32))
        after = run(runtime, one_stage_each("collectives", ops), before, mode)
    for name, r in at.items():
        wanted = before[root] if name.startswith("broadcast") else after[0]
        for rank, state in enumerate(after):
            same = np.array_equal(_raw(wanted, r), _raw(state, r))
            require(same, f"{r} of rank {rank} differs from the other ranks'")


def check_not_finite_is_seen(
    settings: Settings,
    *,
    offset: int = 0,
    count: int = 17,
    rank: int = 0,
    bucket: int = 0,
    element: int = 0,
    value: float = np.nan,
    dtype: DType = F32,
    mode: str = "fused",
) -> None:
    """22: one NaN or Inf on one rank, in either bucket, sets the flag of all; without it none."""
    slots = Slots(offset, count)
    slots.scalars("flag", dtype=I32)
    slots.add("bucket.0", dtype)
    slots.add("bucket.1", dtype)
    plan, at = slots.build()
    buckets = [at["bucket.0"], at["bucket.1"]]
    ops = [range_op.sum_all_reduce(r) for r in buckets]
    program = one_stage_each("check", [*ops, range_op.nan_check(at["flag"], *buckets)])
    with Runtime(settings, plan) as runtime:
        states = [initial_bytes(plan, k) for k in range(runtime.world_size)]
        for state in states:
            read(state, at["flag"])[:] = 0
        for poisoned in (False, True):
            if poisoned:
                numbers = load(states[rank], buckets[bucket])
                numbers[element] = value
                store(states[rank], buckets[bucket], numbers)
            for k, state in enumerate(run(runtime, program, states, mode)):
                flag = int(read(state, at["flag"])[0])
                require(flag == poisoned, f"rank {k}: flag {flag}, rank {rank} has {value}")


def _raw(state: Bytes, r: Range) -> Bytes:
    return state[r.offset : r.end]


def _ulp(value: float, dtype: DType) -> float:
    """Distance of `value` to the next larger number of a dtype."""
    if dtype == BF16:
        return float(np.spacing(np.float32(value))) * 2.0**16
    return float(np.spacing(np.dtype(dtype.numpy).type(value)))


def _near(plan: MemoryPlan, places: NDArray[np.intp]) -> str:
    below = [t.name for t in plan.tensors if places.size and t.offset <= places[0]]
    return below[-1] if below else "nothing"
