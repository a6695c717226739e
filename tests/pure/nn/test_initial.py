import numpy as np
import pytest

from trlow.nn import cnn, compile_model, conv, fc, gap, initial_state, relu, seq


def compiled(model, optimizer="momentum"):
    return compile_model(
        model, input_shape=(8, 8, 1), local_batch=4, world_size=2, optimizer=optimizer
    )


def test_one_seed_gives_one_state_and_another_seed_another():
    model = compiled(cnn())
    first, again, other = (initial_state(model, seed) for seed in (3, 3, 4))
    assert first.keys() == again.keys() == other.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["conv0.weight"], other["conv0.weight"])


def test_weights_are_he_normal_and_the_rest_neutral():
    model = compiled(seq(conv(64, 3), relu(), conv(128, 3), gap(), fc(10)))
    state = initial_state(model, 0)
    for name, fan_in in (("conv2.weight", 9 * 64), ("fc4.weight", 128)):
        weights = state[name]
        wanted = (2 / fan_in) ** 0.5
        # the deviation of n normal numbers is off by wanted / sqrt(2 n); five times that
        assert abs(weights.std() - wanted) < 5 * wanted / (2 * weights.size) ** 0.5
        assert abs(weights.mean()) < 5 * wanted / weights.size**0.5
    assert not state["fc4.bias"].any()
    assert not state["moment.conv2.weight"].any()


def test_batch_norm_begins_as_the_identity():
    state = initial_state(compiled(cnn()), 0)
    for name, value in (
        ("bn1.weight", 1),
        ("bn1.bias", 0),
        ("prev.bn1.mean", 0),
        ("prev.bn1.var", 1),
        ("eq.bn1.scale", 1),
        ("eq.bn1.bias", 0),
    ):
        assert np.all(state[name] == value), name


def test_every_persistent_tensor_has_a_value_of_its_shape():
    model = compiled(cnn())
    state = initial_state(model, 0)
    for region in model.plan.table:
        for tensor in model.plan.tensors_in(region.name):
            if region.persistent:
                assert state[tensor.name].shape == tensor.shape
                assert state[tensor.name].dtype == tensor.dtype.numpy


def test_a_layer_behind_changes_no_weight_before():
    short = initial_state(compiled(seq(conv(4, 3), gap(), fc(10))), 5)
    long = initial_state(compiled(seq(conv(4, 3), conv(6, 3), gap(), fc(10))), 5)
    assert np.array_equal(short["conv0.weight"], long["conv0.weight"])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits_differ(seed):
    model = compiled(seq(gap(), fc(10)))
    assert not np.array_equal(
        initial_state(model, seed)["fc1.weight"], initial_state(model, seed ^ 1)["fc1.weight"]
    )


def test_without_momentum_there_is_no_moment():
    assert not [n for n in initial_state(compiled(cnn(), "sgd"), 0) if n.startswith("moment.")]
