"""Optimizer updates against float64 over five steps. Invariants 23 and 24."""

from __future__ import annotations

import numpy as np
import pytest

COUNTS = (0, 1, 2, 3, 7, 15, 17, 255, 256, 257, 4099)
RULES = ("sgd", "momentum", "nesterov")
FORMS = ("weight", "bias")
STEPS = 5


def scalar(value, dtype=np.float32):
    return np.array([value], dtype)


def arguments(rule, form, w, m, g, *, lr, mu=0.9, decay=0.01, scale=0.25, skip=0):
    """The kernel's arguments in declared order."""
    moments = () if rule == "sgd" else (m,)
    keep = () if rule == "sgd" else (scalar(mu),)
    shrink = (scalar(decay),) if form == "weight" else ()
    rest = (scalar(scale), scalar(skip, np.int32), w.size)
    return (w, *moments, g, scalar(lr), *keep, *shrink, *rest)


def reference_step(rule, form, w, m, g, *, lr, mu=0.9, decay=0.01, scale=0.25):
    """One step in float64: the formulas of the kernels' comment."""
    gradient = g * scale + (decay * w if form == "weight" else 0)
    if rule == "sgd":
        return w - lr * gradient, m
    m = mu * m + gradient
    return w - lr * (m if rule == "momentum" else gradient + mu * m), m


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", COUNTS)
def test_five_steps_follow_the_float64_reference(run, guarded, rng, rule, form, count):
    for offset in range(8):
        w = guarded(rng.standard_normal(count).astype(np.float32), offset)
        m = guarded(rng.standard_normal(count).astype(np.float32), 7 - offset)
        exact_w, exact_m = w.array.astype(np.float64), m.array.astype(np.float64)
        for step in range(STEPS):
            g = rng.standard_normal(count).astype(np.float32)
            lr = 0.1 / (step + 1)
            run(f"{rule}_{form}", *arguments(rule, form, w.array, m.array, g, lr=lr))
            exact_w, exact_m = reference_step(rule, form, exact_w, exact_m, g, lr=lr)
        # magnitudes stay below 8; a step rounds about six times, each at most 2^-22 there
        np.testing.assert_allclose(w.array, exact_w, rtol=0, atol=STEPS * 6 * 2.0**-22)
        if rule != "sgd":
            np.testing.assert_allclose(m.array, exact_m, rtol=0, atol=STEPS * 6 * 2.0**-22)
        assert w.intact()
        assert m.intact()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_rate_zero_leaves_every_weight_byte_while_moments_advance(run, rule, form):
    special = np.array([-0.0, 0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, 3.0], np.float32)
    gradients = np.array([1, -1, np.inf, np.nan, 0, 1, 1, -np.inf], np.float32)
    w, m = special.copy(), np.zeros(8, np.float32)
    run(f"{rule}_{form}", *arguments(rule, form, w, m, gradients, lr=0.0))
    assert w.tobytes() == special.tobytes()
    assert rule == "sgd" or m[0] != 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skip", [1, -1])
def test_a_skipped_update_writes_nothing(run, rng, rule, form, skip):
    w, m, g = rng.standard_normal((3, 33)).astype(np.float32)
    before = w.tobytes(), m.tobytes()
    run(f"{rule}_{form}", *arguments(rule, form, w, m, g, lr=0.1, skip=skip))
    assert (w.tobytes(), m.tobytes()) == before


@pytest.mark.parametrize("rule", RULES)
def test_weight_decay_is_no_momentum(run, rng, rule):
    w, m = rng.standard_normal((2, 33)).astype(np.float32)
    g = np.zeros(33, np.float32)
    decayed, kept = w.copy(), w.copy()
    run(f"{rule}_weight", *arguments(rule, "weight", decayed, m.copy(), g, lr=0.5, mu=0, decay=0.5))
    run(f"{rule}_bias", *arguments(rule, "bias", kept, m.copy(), g, lr=0.5, mu=0))
    assert np.array_equal(decayed, w - np.float32(0.5) * (np.float32(0.5) * w))
    assert np.array_equal(kept, w)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_scaled_wherever_it_is_consumed(run, rng, form):
    w, g = rng.standard_normal((2, 33)).astype(np.float32)
    once, twice = w.copy(), w.copy()
    run(f"sgd_{form}", *arguments("sgd", form, once, None, g, lr=0.1, scale=0.5))
    run(f"sgd_{form}", *arguments("sgd", form, twice, None, g * 0.5, lr=0.1, scale=1.0))
    assert np.array_equal(once, twice)
