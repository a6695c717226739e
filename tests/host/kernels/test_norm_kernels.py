"""Batch norm against float64. The tolerances: a sum of `rows` terms rounds `rows` times at most,
and the tree makes it far fewer; 1e-5 relative to the magnitudes at hand is ten times what is seen.
"""

from __future__ import annotations

import numpy as np
import pytest

SHAPES = ((1, 1), (2, 3), (7, 16), (255, 5), (256, 17), (257, 32), (600, 33))
MOMENTUM, EPS = np.float32(0.1), np.float32(1e-5)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def one(value):
    return np.array([value], np.float32)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


class Case:
    """One batch [rows][c] with its exact statistics."""

    def __init__(self, rng, rows, c):
        self.rows, self.c = rows, c
        self.x = normal(rng, rows, c) * 2 + 3
        self.dy = normal(rng, rows, c)
        self.weight, self.bias = normal(rng, 2, c)
        exact = self.x.astype(np.float64)
        self.mean, self.var = exact.mean(0), exact.var(0)
        self.rstd = 1 / np.sqrt(self.var + EPS)
        self.xhat = (exact - self.mean) * self.rstd
        self.mean32, self.rstd32 = self.mean.astype(np.float32), self.rstd.astype(np.float32)


@pytest.fixture(params=SHAPES, ids=str)
def case(request, rng):
    return Case(rng, *request.param)


def test_statistics_of_the_batch_and_running_ones(run, guarded, rng, case):
    for offset in (0, 1, 3):
        out = [guarded(np.full(case.c, np.nan, np.float32), offset) for _ in range(4)]
        prev_mean, prev_var = normal(rng, case.c), abs(normal(rng, case.c))
        x = guarded(case.x, offset).array
        scalars = (one(MOMENTUM), one(EPS))
        arrays = [each.array for each in out]
        run("bn_stats", *arrays, prev_mean, prev_var, x, *scalars, case.rows, case.c)
        mean, rstd, next_mean, next_var = arrays
        unbiased = case.var * case.rows / max(case.rows - 1, 1)
        np.testing.assert_allclose(mean, case.mean, **CLOSE)
        np.testing.assert_allclose(rstd, case.rstd, **CLOSE)
        np.testing.assert_allclose(next_mean, 0.9 * prev_mean + 0.1 * case.mean, **CLOSE)
        np.testing.assert_allclose(next_var, 0.9 * prev_var + 0.1 * unbiased, **CLOSE)
        assert all(each.intact() for each in out)


def test_variance_survives_a_large_mean(run):
    x = (np.arange(512, dtype=np.float32) % 2 + 10_000).reshape(512, 1)  # variance 1/4, exactly
    mean, rstd, next_mean, next_var = np.zeros((4, 1), np.float32)
    zero = one(0)
    run("bn_stats", mean, rstd, next_mean, next_var, zero, zero, x, one(1), zero, 512, 1)
    assert mean[0] == 10_000.5
    assert rstd[0] == 2.0
    assert next_var[0] == np.float32(0.25 * 512 / 511)


def test_apply_is_the_formula_step_by_step(run, guarded, case):
    for offset in (0, 1, 3):
        y = guarded(np.full_like(case.x, np.nan), offset)
        parameters = (case.mean32, case.rstd32, case.weight, case.bias)
        run("bn_apply", y.array, case.x, *parameters, case.rows, case.c)
        expected = (case.x - case.mean32) * case.rstd32 * case.weight + case.bias
        assert np.array_equal(y.array, expected)
        assert y.intact()


def test_apply_folded_is_the_formula_step_by_step(run, guarded, case):
    y = guarded(np.full_like(case.x, np.nan), 1)
    run("bn_apply_eq", y.array, case.x, case.weight, case.bias, case.rows, case.c)
    assert np.array_equal(y.array, case.x * case.weight + case.bias)
    assert y.intact()


def test_reduction_overwrites_the_sums_and_adds_to_the_gradients(run, guarded, case):
    c = case.c
    dweight, dbias = guarded(np.full(c, 2, np.float32), 1), guarded(np.full(c, 3, np.float32), 2)
    sums = guarded(np.full(2 * c, np.nan, np.float32), 3)
    outputs = (dweight.array, dbias.array, sums.array)
    run("bn_bwd_reduce", *outputs, case.dy, case.x, case.mean32, case.rstd32, case.rows, c)
    plain = case.dy.astype(np.float64).sum(0)
    product = (case.dy * case.xhat).sum(0)
    close = {"rtol": 1e-5, "atol": 1e-5 * np.sqrt(case.rows)}
    np.testing.assert_allclose(sums.array, np.concatenate([plain, product]), **close)
    np.testing.assert_allclose(dbias.array, 3 + plain, **close)
    np.testing.assert_allclose(dweight.array, 2 + product, **close)
    assert dweight.intact()
    assert dbias.intact()
    assert sums.intact()


def test_data_gradient_is_the_derivative(run, guarded, case):
    plain = case.dy.astype(np.float64).sum(0)
    product = (case.dy * case.xhat).sum(0)
    sums = np.concatenate([plain, product]).astype(np.float32)
    dx = guarded(np.full_like(case.x, np.nan), 1)
    statistics = (case.mean32, case.rstd32, case.weight, sums)
    run("bn_bwd_data", dx.array, case.dy, case.x, *statistics, case.rows, case.c)
    inner = case.dy - plain / case.rows - case.xhat * product / case.rows
    scale = abs(case.weight * case.rstd).max()  # eps makes rstd 316 where the variance is 0
    np.testing.assert_allclose(
        dx.array, case.weight * case.rstd * inner, rtol=1e-5, atol=1e-5 * max(scale, 1)
    )
    assert dx.intact()


def test_data_gradient_agrees_with_a_difference_quotient(run, rng):
    case = Case(rng, 9, 2)
    plain, product = case.dy.sum(0), (case.dy * case.xhat).sum(0).astype(np.float32)
    dx = np.zeros_like(case.x)
    statistics = (case.mean32, case.rstd32, case.weight, np.concatenate([plain, product]))
    run("bn_bwd_data", dx, case.dy, case.x, *statistics, 9, 2)

    def loss(x):
        mean, var = x.mean(0), x.var(0)
        return (((x - mean) / np.sqrt(var + EPS) * case.weight + case.bias) * case.dy).sum()

    step, exact = 1e-5, case.x.astype(np.float64)
    for place in range(exact.size):
        up, down = exact.copy(), exact.copy()
        up.flat[place] += step
        down.flat[place] -= step
        assert abs((loss(up) - loss(down)) / (2 * step) - dx.flat[place]) < 1e-5
