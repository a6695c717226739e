"""A runtime of four ranks on the host device, with buckets whose mean is known."""

from __future__ import annotations

import numpy as np
import pytest

import trlow


@pytest.fixture
def settings():
    return trlow.Settings(device="host", gpus="0-3", host_devices=4, deadline_s=20.0)


@pytest.fixture
def runtime(settings, small):
    with trlow.Runtime(settings, small.plan) as made:
        for rank, arena in enumerate(made.arenas):
            arena.copy_in("early", np.full(1000, rank, np.float32))
            arena.copy_in("late", np.full(24, 10.0 * rank, np.float32))
            arena.copy_in("factor", np.array([0.25], np.float32))
            arena.copy_in("one", np.array([1.0], np.float32))
        yield made
