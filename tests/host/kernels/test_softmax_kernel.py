"""Softmax cross-entropy, its gradient and its metrics, against float64."""

from __future__ import annotations

import numpy as np
import pytest

SHAPES = ((1, 1), (1, 2), (3, 3), (32, 10), (255, 4), (257, 17), (600, 10))
CLOSE = {"rtol": 2e-6, "atol": 2e-6}  # exp and log are within 2 ulp, a sum of classes adds a few


class Answer:
    """What the kernel leaves: result [3], dlogits, predicted."""

    def __init__(self, run, guarded, logits, labels, rows):
        n, classes = logits.shape
        result = guarded(np.full(3, np.nan, np.float32), 1)
        dlogits = guarded(np.full_like(logits, np.nan), 3)
        predicted = guarded(np.full(n, -1, np.int32), 2)
        real = np.array([rows], np.float32)
        outputs = (result.array, dlogits.array, predicted.array)
        run("softmax_xent", *outputs, logits, labels.astype(np.int32), real, n, classes)
        assert result.intact()
        assert dlogits.intact()
        assert predicted.intact()
        self.result, self.dlogits, self.predicted = outputs


def reference(logits, labels, rows):
    """Loss per row, gradient and hits of the real rows, in float64."""
    n = len(logits)
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(1, keepdims=True)
    logsum = np.log(np.exp(shifted).sum(1))
    loss = logsum - shifted[np.arange(n), labels]
    gradient = np.exp(shifted - logsum[:, None])
    gradient[np.arange(n), labels] -= 1
    # the classes by falling score, equal ones by index
    place = np.argsort(-exact, axis=1, kind="stable")
    rank = (place == labels[:, None]).argmax(1)
    real = np.arange(n) < rows
    result = [(value * real).sum() / n for value in (loss, rank < 1, rank < 5)]
    return result, gradient * real[:, None] / n


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("missing", [0, 1, 1000])
def test_loss_gradient_and_metrics_of_the_real_rows(run, guarded, rng, shape, missing):
    n, classes = shape
    rows = max(n - missing, 0)
    logits = (rng.standard_normal(shape) * 4).astype(np.float32)
    labels = rng.integers(0, classes, n)
    answer = Answer(run, guarded, logits, labels, rows)
    result, gradient = reference(logits, labels, rows)
    np.testing.assert_allclose(answer.result, result, **CLOSE)
    np.testing.assert_allclose(answer.dlogits, gradient, **CLOSE)
    assert not answer.dlogits[rows:].any()
    assert np.array_equal(answer.predicted, logits.argmax(1))
    assert answer.result[1] == np.float32(round(result[1] * n)) / np.float32(n)
    assert answer.result[2] == np.float32(round(result[2] * n)) / np.float32(n)


def test_ties_go_to_the_first_class(run, guarded):
    logits = np.zeros((3, 10), np.float32)
    answer = Answer(run, guarded, logits, np.array([0, 4, 5]), 3)
    assert not answer.predicted.any()
    assert answer.result[1] == np.float32(1 / 3)  # label 0 alone is the first maximum
    assert answer.result[2] == np.float32(2 / 3)  # 4 has four classes before it, 5 has five


def test_huge_logits_overflow_nothing(run, guarded):
    logits = np.array([[1e30, -1e30, 0], [-3e38, 3e38, -3e38]], np.float32)
    answer = Answer(run, guarded, logits, np.array([0, 1]), 2)
    assert answer.result[0] == 0
    assert not answer.dlogits.any()
    wrong = Answer(run, guarded, logits[:1], np.array([2]), 1)
    assert wrong.result[0] == np.float32(1e30)
    assert list(wrong.dlogits[0]) == [1, 0, -1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_logit_shows_in_the_loss_and_is_no_hit(run, guarded, bad):
    for place in range(3):
        logits = np.array([[1, 2, 3]], np.float32)
        logits[0, place] = bad
        answer = Answer(run, guarded, logits, np.array([1]), 1)
        assert np.isnan(answer.result[0])
        assert np.isnan(answer.dlogits).any()
        assert place == 1 or answer.result[1] == 0


@pytest.mark.parametrize("label", [-1, 3, 2**31 - 1])
def test_a_label_that_is_no_class_reads_nothing_and_shows_in_the_loss(run, guarded, label):
    answer = Answer(run, guarded, np.ones((1, 3), np.float32), np.array([label]), 1)
    assert np.isnan(answer.result[0])
    assert answer.result[1] == 0
    assert answer.result[2] == 0


def test_losses_over_the_whole_range_of_exponents(run, guarded):
    gaps = np.concatenate([np.linspace(-104, 0, 4001), np.geomspace(1e-38, 1, 200) * -1])
    logits = np.stack([np.zeros_like(gaps), gaps], 1).astype(np.float32)
    answer = Answer(run, guarded, logits, np.zeros(len(gaps), np.int32), len(gaps))
    exact = np.exp(logits[:, 1].astype(np.float64))
    probability = exact / (1 + exact)
    # 5 ulp; exp is 0 below the normal numbers, and dlogits / n rounds to their spacing there
    tolerance = 6e-7 * probability + np.where(exact < 2e-38, 2e-38, len(gaps) * 2.0**-149)
    assert (abs(answer.dlogits[:, 1] * len(gaps) - probability) <= tolerance).all()
