"""A float64 reference of the forward pass, and tasks on the host device with made-up data."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from trlow.data import Dataset
from trlow.nn.layers import (
    BatchNorm,
    Conv,
    Flatten,
    FullyConnected,
    GlobalAveragePool,
    MaxPool,
    Relu,
)
from trlow.schedule import Training
from trlow.settings import Settings
from trlow.task import Task


def windows(x, k, stride):
    """(n, h, w, c) as (n, ho, wo, c, k, k)."""
    view = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))
    return view[:, ::stride, ::stride]


class Reference:
    """The model in float64, layer by layer, as the layers' docstrings say it."""

    def __init__(self, model):
        self.model = model

    def logits(self, state, x, statistics=None):
        """`statistics`, if given, receives (mean, biased variance, rows) of each batch norm."""
        x = x.astype(np.float64)
        for index, layer in enumerate(self.model.layers):
            x = self._layer(index, layer, state, x, statistics)
        return x

    def _layer(self, index, layer, state, x, statistics):
        match layer:
            case Conv():
                p = layer.padding
                x = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
                patches = windows(x, layer.k, layer.stride)
                return np.einsum("nhwcij,ijco->nhwo", patches, state[f"conv{index}.weight"])
            case BatchNorm():
                axes = tuple(range(x.ndim - 1))
                if statistics is None:
                    mean, var = state[f"prev.bn{index}.mean"], state[f"prev.bn{index}.var"]
                else:
                    mean, var = x.mean(axes), x.var(axes)
                    statistics[index] = (mean, var, x.size // x.shape[-1])
                normal = (x - mean) / np.sqrt(var + layer.eps)
                return normal * state[f"bn{index}.weight"] + state[f"bn{index}.bias"]
            case Relu():
                return np.maximum(x, 0)
            case MaxPool():
                return windows(x, layer.k, layer.step).max((-2, -1))
            case GlobalAveragePool():
                return x.mean((1, 2))
            case Flatten():
                return x.reshape(len(x), -1)
            case FullyConnected():
                return x @ state[f"fc{index}.weight"] + state[f"fc{index}.bias"]
        raise AssertionError(layer)

    def losses(self, logits, labels):
        """Cross-entropy of each row."""
        shifted = logits - logits.max(1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(1))
        return log_sum - shifted[np.arange(len(labels)), labels]

    def loss(self, state, x, labels):
        """Mean cross-entropy of one rank's batch in training."""
        return self.losses(self.logits(state, x, {}), labels).mean()

    def metrics(self, state, x, labels):
        """Loss, top-1, top-5 over rows in inference: (loss, top1, top5) means."""
        logits = self.logits(state, x)
        rank = (logits > logits[np.arange(len(labels)), labels][:, None]).sum(1)
        return self.losses(logits, labels).mean(), (rank < 1).mean(), (rank < 5).mean()


@pytest.fixture
def reference():
    return Reference


@pytest.fixture
def make_data():
    """make_data(rows, shape, classes, seed): pictures of normal numbers with labels at random."""

    def make(rows, shape=(6, 6, 1), classes=7, seed=0):
        generator = np.random.default_rng([seed, rows, *shape])
        features = generator.standard_normal((rows, *shape)).astype(np.float32)
        labels = generator.integers(0, classes, rows).astype(np.int32)
        return Dataset(f"noise{rows}", features, labels, classes)

    return make


@pytest.fixture
def open_task():
    """open_task(model, train, validation, ranks=, batch=, ...): a compiled task, closed behind."""

    @contextmanager
    def opened(
        model,
        train,
        validation=None,
        *,
        ranks=1,
        batch=8,
        seed=0,
        schedule_seed=0,
        frozen=(),
        **training,
    ):
        settings = Settings(
            device="host",
            host_devices=ranks,
            any_world_size=True,
            global_batch_size=batch,
            seed=seed,
            host_schedule_seed=schedule_seed,
            deadline_s=30.0,
        )
        task = Task(
            settings,
            model,
            train,
            validation or train,
            training=Training(**training),
            frozen=frozen,
        )
        with task:
            task.compile()
            yield task

    return opened


@pytest.fixture
def persistent():
    """persistent(task, rank): the bytes of everything persistent by tensor name."""

    def read(task, rank=0):
        plan = task.compiled.plan
        names = [t.name for t in plan.tensors if plan.table[t.region].persistent]
        return {name: task.runtime.arenas[rank].copy_out(name) for name in names}

    return read
