"""ReLU, pooling and fully connected layers. Small integers make every sum exact, in any order."""

from __future__ import annotations

import numpy as np
import pytest

COUNTS = (0, 1, 2, 3, 7, 15, 17, 255, 256, 257, 4099)
PICTURES = (  # n, h, w, c, k, stride
    (1, 2, 2, 1, 2, 2),
    (2, 8, 8, 32, 2, 2),
    (2, 5, 7, 3, 2, 2),
    (1, 7, 6, 17, 3, 2),
    (1, 5, 5, 16, 3, 1),
    (1, 7, 7, 5, 2, 3),  # positions that no window holds
)
LAYERS = ((1, 1, 1), (3, 5, 10), (32, 64, 10), (7, 17, 33), (2, 64, 128))


def small(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("count", COUNTS)
def test_relu_and_its_gradient(run, guarded, rng, count):
    x, dy = small(rng, 2, count)
    for offset in range(8):
        y, dx = guarded(np.full_like(x, np.nan), offset), guarded(np.full_like(x, np.nan), 1)
        run("relu_fwd", y.array, x, count)
        run("relu_bwd", dx.array, dy, y.array, count)
        assert np.array_equal(y.array, np.maximum(x, 0))
        assert np.array_equal(dx.array, np.where(x > 0, dy, 0))
        assert y.intact()
        assert dx.intact()


def test_relu_may_run_in_place_and_lets_a_nan_through(run):
    x = np.array([-1, -0.0, 0, 2, np.nan, -np.inf, np.inf], np.float32)
    run("relu_fwd", x, x, 7)
    assert x.tobytes() == np.array([0, 0, 0, 2, np.nan, 0, np.inf], np.float32).tobytes()


def windows(x, k, stride):
    """[n][ho][wo][k*k][c], rows of the window first."""
    view = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))
    view = view[:, ::stride, ::stride]
    return np.moveaxis(view.reshape(*view.shape[:4], k * k), 3, 4)


def scattered(x, dy, k, stride):
    """Each window's gradient at its first maximum."""
    dx = np.zeros(x.shape)
    first = windows(x, k, stride).argmax(3)
    for image, row, column, channel in np.ndindex(*dy.shape):
        r, s = divmod(int(first[image, row, column, channel]), k)
        place = image, row * stride + r, column * stride + s, channel
        dx[place] += dy[image, row, column, channel]
    return dx


@pytest.mark.parametrize("picture", PICTURES, ids=str)
def test_max_pool_and_its_gradient_with_ties(run, guarded, rng, picture):
    n, h, w, c, k, stride = picture
    x = rng.integers(0, 3, (n, h, w, c)).astype(np.float32)  # few values: many ties
    expected = windows(x, k, stride).max(3)
    ho, wo = expected.shape[1:3]
    dy = small(rng, n, ho, wo, c)
    for offset in (0, 1, 3):
        y, dx = guarded(np.full_like(dy, np.nan), offset), guarded(np.full_like(x, np.nan), offset)
        run("maxpool_fwd", y.array, guarded(x, offset).array, n, h, w, c, ho, wo, k, stride)
        run("maxpool_bwd", dx.array, dy, guarded(x, 1).array, n, h, w, c, ho, wo, k, stride)
        assert np.array_equal(y.array, expected)
        assert np.array_equal(dx.array, scattered(x, dy, k, stride))
        assert y.intact()
        assert dx.intact()


def test_max_pool_keeps_a_nan_wherever_it_is(run):
    for place in range(4):
        x = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1)
        x.flat[place] = np.nan
        y, dx = np.zeros(1, np.float32), np.zeros(4, np.float32)
        run("maxpool_fwd", y, x, 1, 2, 2, 1, 1, 1, 2, 2)
        run("maxpool_bwd", dx, np.ones(1, np.float32), x, 1, 2, 2, 1, 1, 1, 2, 2)
        assert np.isnan(y[0])
        assert dx[place] == 1
        assert dx.sum() == 1


def test_max_pool_of_equal_infinities_has_one_winner(run):
    x = np.full(4, -np.inf, np.float32)
    y, dx = np.zeros(1, np.float32), np.zeros(4, np.float32)
    run("maxpool_fwd", y, x, 1, 2, 2, 1, 1, 1, 2, 2)
    run("maxpool_bwd", dx, np.ones(1, np.float32), x, 1, 2, 2, 1, 1, 1, 2, 2)
    assert y[0] == -np.inf
    assert list(dx) == [1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 16), (3, 16, 64), (2, 9, 17), (1, 64, 5)])
def test_average_pool_and_its_gradient(run, guarded, rng, shape):
    n, hw, c = shape
    x, dy = small(rng, n, hw, c), small(rng, n, c)
    y, dx = guarded(np.full_like(dy, np.nan), 1), guarded(np.full_like(x, np.nan), 3)
    run("avgpool_fwd", y.array, x, n, hw, c)
    run("avgpool_bwd", dx.array, dy, n, hw, c)
    assert np.array_equal(y.array, x.sum(1) / np.float32(hw))
    assert np.array_equal(dx.array, np.broadcast_to((dy / np.float32(hw))[:, None], x.shape))
    assert y.intact()
    assert dx.intact()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_fully_connected_and_its_gradients(run, guarded, rng, layer):
    n, cin, cout = layer
    x, w, b, dy = small(rng, n, cin), small(rng, cin, cout), small(rng, cout), small(rng, n, cout)
    for offset in (0, 1, 3):
        y, dx = guarded(np.full_like(dy, np.nan), offset), guarded(np.full_like(x, np.nan), offset)
        dw, db = guarded(np.ones_like(w), offset), guarded(np.ones_like(b), offset)
        run("fc_fwd", y.array, x, w, b, n, cin, cout)
        run("fc_bwd_data", dx.array, dy, w, n, cin, cout)
        run("fc_bwd_weight", dw.array, x, dy, n, cin, cout)
        run("fc_bwd_bias", db.array, dy, n, cout)
        assert np.array_equal(y.array, x @ w + b)
        assert np.array_equal(dx.array, dy @ w.T)
        assert np.array_equal(dw.array, 1 + x.T @ dy)
        assert np.array_equal(db.array, 1 + dy.sum(0))
        assert all(each.intact() for each in (y, dx, dw, db))
