"""The digits on real GPUs, against the host device and against fewer GPUs."""

from __future__ import annotations

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
    """Eleven steps; reductions differ in order, so fp32 rounding is amplified step by step."""
    gpu, _, _ = weights_after_one_epoch(device, "0", model)
    host, _, _ = weights_after_one_epoch("host", "0", model)
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
