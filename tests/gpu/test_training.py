"""The digits on real GPUs, against the host device and against fewer GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trlow.data import load_digits
from trlow.nn.models import MODELS
from trlow.schedule import Training
from trlow.settings import Settings
from trlow.task import Task

pytestmark = pytest.mark.timeout(110)


def weights_after_one_epoch(device, gpus, model="cnn", replay="fused", batch=128):
    train, validation = load_digits()
    settings = Settings(device=device, gpus=gpus, global_batch_size=batch, deadline_s=30.0)
    training = Training(lr=0.05, schedule="constant", optimizer="momentum", replay=replay)
    with Task(settings, MODELS[model](train.classes), train, validation, training=training) as task:
        history = task.fit(1)
        digests = task.weights_digests()
        assert len(set(digests)) == 1
        names = [parameter.name for parameter in task.compiled.network.parameters]
        weights = {name: task.runtime.arenas[0].copy_out(name) for name in names}
    return weights, digests[0], history


def distance(left, right):
    return max(
        float(np.linalg.norm(left[name] - right[name]) / (np.linalg.norm(right[name]) + 1e-12))
        for name in left
    )


@pytest.mark.gpu(1)
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_one_gpu_agrees_with_the_host_device(device, model):
    """Twenty-two steps; sums differ in order, and fp32 rounding is amplified step by step."""
    gpu, _, _ = weights_after_one_epoch(device, "0", model, batch=64)
    host, _, _ = weights_after_one_epoch("host", "0", model, batch=64)
    assert distance(gpu, host) < 1e-3


@pytest.mark.gpu(2)
def test_fused_staged_and_a_second_run_are_byte_equal_on_two_gpus(device):
    digests = {
        weights_after_one_epoch(device, "0-1", replay=mode)[1] for mode in ("fused", "staged")
    }
    digests.add(weights_after_one_epoch(device, "0-1")[1])
    assert len(digests) == 1


@pytest.mark.gpu(2)
def test_two_gpus_with_half_the_batch_agree_with_one(device):
    two, _, _ = weights_after_one_epoch(device, "0-1", "mlp")
    one, _, _ = weights_after_one_epoch(device, "0", "mlp")
    assert distance(two, one) < 1e-4


@pytest.mark.gpu(2)
def test_weights_are_bitwise_equal_across_ranks_at_each_of_500_steps(device):
    train, validation = load_digits()
    settings = Settings(device=device, gpus="0-1", global_batch_size=128, deadline_s=30.0)
    with Task(settings, MODELS["mlp"](train.classes), train, validation) as task:
        task.compile()
        batches = task.repeated_batches(500)
        batches = replace(batches, rates=(0.05,) * 500)
        digests = set()
        for step in range(500 if device == "cuda" else 20):
            task.replays["train"].run(1, batches.fill, first_step=step)
            mine = task.weights_digests()
            assert len(set(mine)) == 1, step
            digests.add(mine[0])
        assert len(digests) > 15  # they move


@pytest.mark.gpu(1)
@pytest.mark.parametrize("gpus", ["0", pytest.param("0-1", marks=pytest.mark.gpu(2))])
def test_eager_fused_and_staged_training_are_bitwise_equal(device, gpus):
    train, validation = load_digits()
    settings = Settings(device=device, gpus=gpus, global_batch_size=64, deadline_s=30.0)
    digests = set()
    for mode in ("eager", "fused", "staged"):
        training = Training(replay="fused" if mode == "eager" else mode)
        model = MODELS["cnn"](train.classes)
        with Task(settings, model, train, validation, training=training) as task:
            task.compile()
            batches = replace(task.repeated_batches(20), rates=(0.05,) * 20)
            if mode == "eager":
                task.runtime.eager(task.compiled.programs["train"], 20, batches.fill)
            else:
                task.replays["train"].run(20, batches.fill)
            digests.update(task.weights_digests())
    assert len(digests) == 1
