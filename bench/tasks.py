"""The tasks that are measured: models, and rows that mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trlow.data import Dataset
from trlow.nn.layers import Sequential, fc, flatten, relu, seq
from trlow.replay import Replay
from trlow.schedule import Training
from trlow.settings import Settings
from trlow.task import Task

DIGITS, MNIST = (8, 8, 1), (28, 28, 1)


def wide() -> Sequential:
    """The MLP that others are measured with."""
    return seq(flatten(), fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10))


def random_rows(rows: int, shape: tuple[int, int, int]) -> Dataset:
    """Rows that mean nothing, in ten classes."""
    random = np.random.default_rng(1)
    labels = random.integers(0, 10, rows, np.int32)
    return Dataset("random", random.random((rows, *shape), np.float32), labels, 10)


def task_of(
    settings: Settings, model: Sequential, batch: int, train: Dataset, **training: Any
) -> Task:
    """A task with `batch` rows per rank that validates on one batch."""
    ranks = ranks_of(settings)
    chosen = replace(settings, global_batch_size=batch * ranks, any_world_size=True)
    one = Dataset(
        train.name, train.features[: batch * ranks], train.labels[: batch * ranks], train.classes
    )
    return Task(chosen, model, train, one, training=Training(lr=0.001, **training))


def train_replay(task: Task) -> Replay:
    """The very graphs that a fit replays."""
    return task.replays["train"]


def ranks_of(settings: Settings) -> int:
    """One rank for each device; `gpus` has to name them."""
    return len(settings.devices(64))
