"""Mean strategies on two GPUs against exact data, eager, fused and staged."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from mean_ranks import COUNT, FLOATS, MODES, Ranks, few_bits, make_plan

import trlow
from trlow.data import load_digits
from trlow.nn.models import MODELS
from trlow.range_op import MEAN_STRATEGIES
from trlow.schedule import Training
from trlow.task import Task

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(110)]

LARGE = (1 << 20) + 3  # elements: another algorithm of NCCL than for COUNT, and an odd tail


@contextmanager
def opened(settings, count=COUNT):
    with trlow.Runtime(settings, make_plan(count)) as runtime:
        ranks = Ranks(runtime)
        ranks.factor(0.5)
        yield ranks


@pytest.fixture
def ranks(gpu_settings):
    with opened(gpu_settings(2)) as made:
        yield made


@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_means_of_few_bit_numbers_are_exact(ranks, strategy):
    values = few_bits(2)
    expected = values.sum(0) / (1 if strategy == "deferred" else 2)
    for mode in MODES:
        mean = ranks.prepared(FLOATS, strategy, mode)
        for name in FLOATS:
            ranks.put(name, values)
        mean()
        for name in FLOATS:
            for got in ranks.get(name):
                assert (got == expected).all(), (mode, name)


def test_all_strategies_agree_to_the_bit_on_normal_numbers(gpu_settings):
    """Halving rounds nothing, so it does not matter on which side of the addition it stands."""
    values = np.random.default_rng(5).normal(size=(2, LARGE)).astype(np.float32)
    values[np.abs(values) < 1e-2] = 1  # halves stay normal in float16 too
    found = {}
    with opened(gpu_settings(2), LARGE) as ranks:
        for strategy in MEAN_STRATEGIES:
            mean = ranks.prepared(FLOATS, strategy, "fused")
            for name in FLOATS:
                ranks.put(name, values)
            mean()
            for name in FLOATS:
                first, second = ranks.get(name)
                assert first.tobytes() == second.tobytes(), (strategy, name)
                found[strategy, name] = first / 2 if strategy == "deferred" else first
    for name in FLOATS:
        for strategy in MEAN_STRATEGIES:
            assert (found[strategy, name] == found["sum_then_scale", name]).all(), (strategy, name)
    assert (found["sum_then_scale", "f32"] == (values[0] + values[1]) / 2).all()


def test_float16_overflows_only_where_a_sum_comes_before_the_scale(ranks):
    for strategy in MEAN_STRATEGIES:
        mean = ranks.prepared(("f16",), strategy, "fused")
        ranks.put("f16", np.full((2, COUNT), 40_000))
        mean()
        early = strategy in {"avg", "premulsum"}
        for got in ranks.get("f16"):
            assert (got == (40_000 if early else np.inf)).all(), strategy


def test_an_integer_average_is_divided_towards_zero(ranks):
    mean = ranks.prepared(("i32",), "avg", "fused")
    values = np.random.default_rng(1).integers(-99, 100, (2, COUNT))
    ranks.put("i32", values)
    mean()
    for got in ranks.get("i32"):
        assert (got == np.trunc(values.sum(0) / 2)).all()


@pytest.mark.parametrize("strategy", ["sum_then_scale", "premulsum"])
def test_a_factor_is_read_at_every_replay(ranks, strategy):
    mean = ranks.prepared(FLOATS, strategy, "fused")
    for factor in (0.5, 0.25, -2.0):
        ranks.factor(factor)
        for name in FLOATS:
            ranks.put(name, few_bits(2))
        mean()
        for name in FLOATS:
            assert all((got == few_bits(2).sum(0) * factor).all() for got in ranks.get(name))


def test_a_premultiplied_sum_works_again_after_a_recovery(ranks):
    def broken(rank, stream):
        message = "no step"
        raise OSError(message)

    external = trlow.External("callback", (), (), broken)
    stage = trlow.Stage("S", trlow.Stream.COMP_1, external=external)
    before = ranks.prepared(("f32",), "premulsum", "fused")
    before()
    with pytest.raises(trlow.TrlowError, match="no step"):
        ranks.runtime.eager(trlow.Program.single("broken", (stage,)))
    again = ranks.prepared(("f32",), "premulsum", "fused")
    ranks.put("f32", few_bits(2))
    again()
    assert all((got == few_bits(2).sum(0) / 2).all() for got in ranks.get("f32"))


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_training_ends_with_the_same_bytes_by_every_strategy(gpu_settings, model):
    """Two ranks: halving rounds nothing, so even the last bit of every weight is the same."""
    train, validation = load_digits()
    digests = {}
    for strategy in MEAN_STRATEGIES:
        settings = gpu_settings(2, global_batch_size=128)
        training = Training(lr=0.05, schedule="constant", mean_strategy=strategy)
        network = MODELS[model](train.classes)
        with Task(settings, network, train, validation, training=training) as task:
            task.fit(1)
            digests[strategy] = task.weights_digests()
    assert len({digest for both in digests.values() for digest in both}) == 1, digests
