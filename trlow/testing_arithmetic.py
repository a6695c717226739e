"""Invariants 21, 23 and 24: what a device computes, against numpy, as checks.

As in trlow.testing_device each opens a runtime of its own, and `offset`, `count` and `mode` are
what they are there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trlow import range_op
from trlow.dtype import BF16, F16, F32, I32, DType
from trlow.plan import MemoryPlan, Range
from trlow.program import Program
from trlow.runtime import Runtime
from trlow.settings import Settings
from trlow.testing_bytes import Floats, load, read, round_bf16
from trlow.testing_plan import require
from trlow.testing_slots import OPTIMIZERS, Slots, one_stage_each, prepared, run, update_of

__all__ = ["check_casts", "check_optimizers", "check_zero_rate"]

_HYPER = {"lr": 0.05, "mu": 0.9, "weight_decay": 0.01, "grad_scale": 0.5}


def check_casts(
    settings: Settings,
    *,
    bits: NDArray[np.uint32] | None = None,
    offset: int = 0,
    mode: str = "eager",
) -> None:
    """21: float16 casts equal numpy's, bfloat16 casts integer arithmetic; NaN stays NaN.

    `bits` are the float32 numbers to narrow. All 65536 halves of each dtype are widened.
    """
    chosen = _edge_bits() if bits is None else np.ascontiguousarray(bits, np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16)
    slots = Slots(offset, chosen.size)
    slots.add("narrow")
    for dtype in (F16, BF16):
        slots.add(f"narrow.{dtype}", dtype)
        slots.add(f"wide.{dtype}", F32, count=halves.size)
        slots.add(f"half.{dtype}", dtype, count=halves.size)
    plan, at = slots.build()
    ops = [range_op.cast(at[f"narrow.{dtype}"], at["narrow"]) for dtype in (F16, BF16)]
    ops += [range_op.cast(at[f"wide.{dtype}"], at[f"half.{dtype}"]) for dtype in (F16, BF16)]
    state = np.zeros(plan.arena_nbytes, np.uint8)
    read(state, at["narrow"]).view(np.uint32)[:] = chosen
    for dtype in (F16, BF16):
        read(state, at[f"half.{dtype}"]).view(np.uint16)[:] = halves
    with Runtime(settings, plan) as runtime:
        program = one_stage_each("casts", ops)
        after = run(runtime, program, [state] * runtime.world_size, mode)
    with np.errstate(all="ignore"):
        wanted: dict[str, NDArray[np.generic]] = {
            f"narrow.{F16}": chosen.view(np.float32).astype(np.float16).view(np.uint16),
            f"narrow.{BF16}": round_bf16(chosen),
            f"wide.{F16}": halves.view(np.float16).astype(np.float32).view(np.uint32),
            f"wide.{BF16}": halves.astype(np.uint32) << np.uint32(16),
        }
    for rank, found in enumerate(after):
        for name, expected in wanted.items():
            raw = read(found, at[name]).view(expected.dtype)
            nan = np.isnan(_floats(expected, at[name].dtype))
            wrong = np.where(nan, ~np.isnan(load(found, at[name])), raw != expected)
            require(not wrong.any(), f"rank {rank}: {name} of element {np.flatnonzero(wrong)[:1]}")


def check_optimizers(
    settings: Settings, *, offset: int = 0, count: int = 17, mode: str = "fused", seed: int = 0
) -> None:
    """23: five steps of each optimizer, weight and bias form, equal float64 arithmetic.

    Each step rounds at most 8 times; the tolerance is that of all of them at the largest number.
    """
    plan, at, program = _optimizers(offset, count)
    generator = np.random.default_rng(seed)
    with Runtime(settings, plan) as runtime:
        replay = prepared(runtime, program, mode)
        _fill(runtime, at, generator)
        ranges = [r for name, r in at.items() if name not in {*_HYPER, "skip"}]
        exact = [
            {r.first: a.copy_out(r).astype(np.float64) for r in ranges} for a in runtime.arenas
        ]
        largest = np.float64(1.0)
        for step in range(5):
            for arena, numbers in zip(runtime.arenas, exact, strict=True):
                for r in ranges:
                    if r.first.endswith(".g"):
                        gradient = generator.standard_normal(r.count, np.float32)
                        arena.copy_in(r, gradient)
                        numbers[r.first] = gradient.astype(np.float64)
                largest = max(largest, _step64(numbers))
            replay(1, step)
        found = [{r.first: arena.copy_out(r) for r in ranges} for arena in runtime.arenas]
    tolerance = 5 * 8 * 2.0**-24 * largest
    for rank, (one, other) in enumerate(zip(found, exact, strict=True)):
        for name, values in one.items():
            error = np.abs(values - other[name]).max(initial=0.0)
            require(error <= tolerance, f"rank {rank}: {name} is off by {error}, not {tolerance}")


def check_zero_rate(
    settings: Settings, *, offset: int = 0, count: int = 17, mode: str = "fused", seed: int = 0
) -> None:
    """24: one replayed step with learning rate 0, between others, leaves every weight byte.

    Every other weight is -0.0 then: subtracting 0 could turn it to 0.0.
    """
    plan, at, program = _optimizers(offset, count)
    weights = [r for name, r in at.items() if name.endswith(".w")]
    with Runtime(settings, plan) as runtime:
        replay = prepared(runtime, program, mode)
        _fill(runtime, at, np.random.default_rng(seed))

        def step(number: int, rate: float) -> list[list[bytes]]:
            for arena in runtime.arenas:
                arena.copy_in(at["lr"], np.array([rate], np.float32))
            replay(1, number)
            return [[arena.copy_out(r).tobytes() for r in weights] for arena in runtime.arenas]

        step(0, _HYPER["lr"])
        before = []
        for arena in runtime.arenas:
            numbers = [arena.copy_out(r) for r in weights]
            for r, values in zip(weights, numbers, strict=True):
                values[::2] = -0.0
                arena.copy_in(r, values)
            before.append([values.tobytes() for values in numbers])
        still, moved = step(1, 0.0), step(2, _HYPER["lr"])
    for rank, rows in enumerate(zip(before, still, moved, strict=True)):
        for r, was, now, after in zip(weights, *rows, strict=True):
            require(was == now, f"rank {rank}: {r} changed at learning rate 0")
            require(after != now or not r.count, f"rank {rank}: {r} stands still at any rate")


def _optimizers(offset: int, count: int) -> tuple[MemoryPlan, dict[str, Range], Program]:
    slots = Slots(offset, count)
    slots.scalars(*_HYPER)
    slots.scalars("skip", dtype=I32)
    slots.optimizers()
    plan, at = slots.build()
    ops = [update_of(at, kind, form) for kind in OPTIMIZERS for form in ("weight", "bias")]
    return plan, at, one_stage_each("optimizers", ops)


def _fill(runtime: Runtime, at: Mapping[str, Range], generator: np.random.Generator) -> None:
    for arena in runtime.arenas:
        for name, r in at.items():
            if name == "skip":
                arena.copy_in(r, np.zeros(1, np.int32))
            elif name in _HYPER:
                arena.copy_in(r, np.array([_HYPER[name]], np.float32))
            else:
                arena.copy_in(r, generator.standard_normal(r.count, np.float32))


def _step64(numbers: dict[str, NDArray[np.float64]]) -> np.float64:
    """Advance all weights and moments by one step; return the largest number met."""
    met = [np.zeros(1)]
    lr, mu, decay, grad_scale = (float(np.float32(value)) for value in _HYPER.values())
    for kind in OPTIMIZERS:
        for form in ("weight", "bias"):
            weight, moment = f"{kind}.{form}.w", f"{kind}.{form}.m"
            g = numbers[f"{kind}.{form}.g"] * grad_scale
            if form == "weight":
                g = g + decay * numbers[weight]
            if kind != "sgd":
                numbers[moment] = mu * numbers[moment] + g
                g = numbers[moment] if kind == "momentum" else g + mu * numbers[moment]
            numbers[weight] = numbers[weight] - lr * g
            met += [numbers[weight], numbers[moment], g]
    return np.float64(np.abs(np.concatenate(met)).max())


def _edge_bits() -> NDArray[np.uint32]:
    """Every exponent and sign, with mantissas at, below and above each half to be rounded."""
    high = np.arange(0, 1 << 32, 1 << 23, dtype=np.uint64)
    parts = np.array(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF]
    )
    return np.add.outer(high, parts.astype(np.uint64)).ravel().astype(np.uint32)


def _floats(raw: NDArray[np.generic], dtype: DType) -> Floats:
    state = np.ascontiguousarray(raw).view(np.uint8)
    return load(state, Range(0, state.size, dtype, "raw", "raw"))
