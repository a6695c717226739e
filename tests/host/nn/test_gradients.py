"""Gradients of whole models, reduced over ranks, against numerical ones of a float64 reference."""

import numpy as np
import pytest

from trlow.batches import epoch_order
from trlow.nn import bn, conv, fc, flatten, gap, maxpool, relu, seq

pytestmark = pytest.mark.timeout(60)

MODELS = {
    "mlp": seq(flatten(), fc(8), relu(), fc(7)),
    "one layer": seq(flatten(), fc(7)),
    "convolutions": seq(conv(3, 3), relu(), conv(4, 3, stride=2), relu(), flatten(), fc(7)),
    "unpadded, strided": seq(conv(3, 4, stride=2, pad=1), conv(4, 2, pad=0), gap(), fc(7)),
    "pools": seq(conv(3, 3), maxpool(3, 2), conv(4, 1), maxpool(2), flatten(), fc(7)),
    "norms": seq(conv(3, 3), bn(), relu(), conv(4, 3), bn(), relu(), gap(), fc(7)),
    "norm of features": seq(flatten(), fc(8), bn(), relu(), fc(7)),
    "norm first": seq(bn(), conv(3, 3), relu(), gap(), fc(7)),
}


def numerical(loss, values):
    """Central differences of a function of `values`, which it reads where they are."""
    gradient = np.empty_like(values)
    step = 1e-5
    for index in np.ndindex(values.shape):
        kept = values[index]
        values[index] = kept + step
        above = loss()
        values[index] = kept - step
        below = loss()
        values[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_numerical_ones(name, ranks, make_data, open_task, reference):
    model = MODELS[name]
    data = make_data(8)
    with open_task(model, data, ranks=ranks, batch=8, lr=0.0, momentum=0.0) as task:
        initial = {
            n: task.runtime.arenas[0].copy_out(n).astype(np.float64)
            for n in (p.name for p in task.compiled.parameters)
        }
        (epoch,) = task.fit(1)
        found = {
            p.name: task.runtime.arenas[ranks - 1].copy_out(p.gradient) / ranks
            for p in task.compiled.parameters
        }
    order = epoch_order(8, 8, task.settings.seed, 0).reshape(ranks, -1)
    checker = reference(model)

    def loss():
        return np.mean(
            [checker.loss(initial, data.features[rows], data.labels[rows]) for rows in order]
        )

    assert epoch.train_loss == pytest.approx(loss(), rel=1e-5)
    for parameter, gradient in found.items():
        wanted = numerical(loss, initial[parameter])
        # float32 sums of at most a few hundred products of order 1, and no kink within a step
        np.testing.assert_allclose(gradient, wanted, rtol=2e-4, atol=2e-5, err_msg=parameter)


def test_a_frozen_layer_passes_the_same_gradient_down(make_data, open_task):
    model = seq(conv(3, 3), bn(), relu(), conv(4, 3), bn(), relu(), gap(), fc(7))
    data = make_data(8)
    gradients = {}
    for frozen in ((), (3, 4)):
        with open_task(model, data, frozen=frozen, lr=0.0) as task:
            task.fit(1)
            gradients[frozen] = task.runtime.arenas[0].copy_out("grad.conv0.weight")
    np.testing.assert_array_equal(gradients[()], gradients[(3, 4)])
