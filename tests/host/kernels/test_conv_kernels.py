"""Convolution against numpy. Small integers make every sum exact, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest


@dataclass(frozen=True)
class Shape:
    """One convolution: n x h x w x cin, kernel kh x kw, cout."""

    n: int
    h: int
    w: int
    cin: int
    cout: int
    kh: int
    kw: int
    stride: int
    pad: int

    @property
    def ho(self):
        return (self.h + 2 * self.pad - self.kh) // self.stride + 1

    @property
    def wo(self):
        return (self.w + 2 * self.pad - self.kw) // self.stride + 1

    @property
    def integers(self):
        s = self
        return (s.n, s.h, s.w, s.cin, s.ho, s.wo, s.cout, s.kh, s.kw, s.stride, s.pad)

    def __str__(self):
        return "x".join(map(str, self.integers))


SHAPES = (
    Shape(1, 1, 1, 1, 1, 1, 1, 1, 0),
    Shape(2, 8, 8, 1, 16, 3, 3, 1, 1),
    Shape(1, 8, 8, 16, 32, 3, 3, 1, 1),
    Shape(1, 4, 4, 32, 64, 3, 3, 1, 1),
    Shape(2, 5, 7, 3, 10, 3, 3, 1, 1),
    Shape(2, 7, 5, 5, 17, 3, 3, 2, 1),
    Shape(1, 6, 9, 3, 17, 5, 5, 2, 2),
    Shape(1, 9, 6, 5, 10, 5, 3, 1, 0),
    Shape(3, 5, 5, 17, 3, 1, 1, 1, 0),
    Shape(1, 7, 7, 4, 20, 1, 1, 2, 0),
    Shape(1, 8, 8, 2, 33, 2, 2, 2, 0),
    Shape(1, 3, 3, 3, 5, 5, 5, 1, 2),  # the kernel is larger than the picture
    Shape(1, 2, 2, 3, 5, 5, 5, 2, 2),  # and its last taps meet padding alone
    Shape(1, 10, 11, 6, 16, 3, 3, 3, 1),  # a remainder that no window reaches
    Shape(1, 5, 5, 3, 4, 1, 1, 3, 1),  # windows that lie in the padding alone
)


def small(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def patches(s, padded, r, c):
    """The input positions that tap (r, c) meets, [n][ho][wo][cin]."""
    down, right = r + s.stride * (s.ho - 1) + 1, c + s.stride * (s.wo - 1) + 1
    return padded[:, r : down : s.stride, c : right : s.stride]


def pad(s, x):
    return np.pad(x.astype(np.float64), ((0, 0), (s.pad, s.pad), (s.pad, s.pad), (0, 0)))


def forward(s, x, w):
    taps = [(r, c) for r in range(s.kh) for c in range(s.kw)]
    return sum(patches(s, pad(s, x), r, c) @ w[r, c].astype(np.float64) for r, c in taps)


def data_gradient(s, dy, w):
    padded = np.zeros((s.n, s.h + 2 * s.pad, s.w + 2 * s.pad, s.cin))
    for r in range(s.kh):
        for c in range(s.kw):
            patches(s, padded, r, c)[...] += dy.astype(np.float64) @ w[r, c].T
    return padded[:, s.pad : s.pad + s.h, s.pad : s.pad + s.w]


def weight_gradient(s, x, dy):
    dw = np.zeros((s.kh, s.kw, s.cin, s.cout))
    for r in range(s.kh):
        for c in range(s.kw):
            dw[r, c] = np.einsum("nhwi,nhwo->io", patches(s, pad(s, x), r, c), dy)
    return dw


def tensors(s, rng):
    x = small(rng, s.n, s.h, s.w, s.cin)
    w = small(rng, s.kh, s.kw, s.cin, s.cout)
    return x, w, small(rng, s.n, s.ho, s.wo, s.cout)


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_forward_is_exact_on_small_integers(run, guarded, rng, s):
    x, w, y = tensors(s, rng)
    for offset in (0, 1, 3):
        out = guarded(np.full_like(y, np.nan), offset)
        operands = guarded(x, offset).array, guarded(w, 2).array
        run("conv2d_fwd", out.array, *operands, *s.integers)
        assert np.array_equal(out.array, forward(s, x, w))
        assert out.intact()


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_data_gradient_is_exact_on_small_integers(run, guarded, rng, s):
    x, w, dy = tensors(s, rng)
    for offset in (0, 1, 3):
        dx = guarded(np.full_like(x, np.nan), offset)
        operands = guarded(dy, offset).array, guarded(w, 2).array
        run("conv2d_bwd_data", dx.array, *operands, *s.integers)
        assert np.array_equal(dx.array, data_gradient(s, dy, w))
        assert dx.intact()


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_weight_gradient_adds_to_what_is_there(run, guarded, rng, s):
    x, w, dy = tensors(s, rng)
    for offset in (0, 1, 3):
        dw = guarded(w, offset)
        operands = guarded(x, offset).array, guarded(dy, 2).array
        run("conv2d_bwd_weight", dw.array, *operands, *s.integers)
        assert np.array_equal(dw.array, w + weight_gradient(s, x, dy))
        assert dw.intact()


def test_gradients_are_those_of_a_numerical_derivative(run, rng):
    # Loss sum(y * dy) is linear in x and in w: a difference of any size is exact.
    s = SHAPES[5]
    x, w, dy = tensors(s, rng)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    run("conv2d_bwd_data", dx, dy, w, *s.integers)
    run("conv2d_bwd_weight", dw, x, dy, *s.integers)

    def loss(x, w):
        return float((forward(s, x, w) * dy).sum())

    for gradient, operand in ((dx, 0), (dw, 1)):
        for place in rng.integers(0, gradient.size, 10):
            moved = [x.copy(), w.copy()]
            moved[operand].flat[place] += 1
            assert loss(*moved) - loss(x, w) == gradient.flat[place]


def test_rounding_stays_within_the_bound_of_a_sequential_sum(run, rng):
    s = SHAPES[3]
    x = rng.standard_normal((s.n, s.h, s.w, s.cin)).astype(np.float32)
    w = rng.standard_normal((s.kh, s.kw, s.cin, s.cout)).astype(np.float32)
    y = np.zeros((s.n, s.ho, s.wo, s.cout), np.float32)
    run("conv2d_fwd", y, x, w, *s.integers)
    terms = s.kh * s.kw * s.cin
    bound = (terms + 1) * 2.0**-24 * forward(s, abs(x), abs(w))
    assert (abs(y - forward(s, x, w)) <= bound).all()


def test_a_nan_in_the_input_reaches_only_its_windows(run, rng):
    s = Shape(1, 6, 6, 2, 3, 3, 3, 1, 1)
    x, w, _ = tensors(s, rng)
    x[0, 0, 0, 1] = np.nan
    y = np.zeros((1, 6, 6, 3), np.float32)
    run("conv2d_fwd", y, x, w, *s.integers)
    assert np.isnan(y[0, :2, :2]).all()
    assert np.isnan(y).sum() == 4 * 3
