"""Arenas as one symmetric window of two GPUs: same bytes as plain ones, and nothing left behind.

No test here lets a rank miss a collective: below NCCL 2.29.7 that could not be aborted.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from mean_ranks import FLOATS, Ranks, few_bits, make_plan

import trlow
from trlow.arena import ABORTABLE_SINCE
from trlow.data import load_digits
from trlow.device import Platform
from trlow.errors import RankError, SettingsError
from trlow.nn.models import MODELS
from trlow.range_op import MEAN_STRATEGIES
from trlow.schedule import Training
from trlow.task import Task

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(110)]

WINDOW = {"arena": "window", "allow_unabortable": True}
LARGE = (1 << 20) + 3


@contextmanager
def opened(settings, count):
    with trlow.Runtime(settings, make_plan(count)) as runtime:
        ranks = Ranks(runtime)
        ranks.factor(0.5)
        yield ranks


def fill(rank, step, slot):
    slot["data"][:] = np.random.default_rng([rank, step]).normal(size=6)


@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
def test_window_and_plain_arenas_end_with_the_same_bytes(gpu_settings, small, mode):
    found = set()
    for fields in (WINDOW, {}):
        with trlow.Runtime(gpu_settings(2, **fields), small.plan) as runtime:
            for arena in runtime.arenas:
                arena.copy_in("one", np.array([1.0], np.float32))
            if mode == "eager":
                runtime.eager(small.feed_program(), 7, fill)
            else:
                runtime.capture(small.feed_program(), mode).run(500, fill, audit=True)
            found.update(arena.copy_out("w").tobytes() for arena in runtime.arenas)
    assert len(found) == 1


@pytest.mark.parametrize("count", [7, 4099, LARGE])
@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_every_mean_is_exact_on_windows(gpu_settings, strategy, count):
    values = few_bits(2, count)
    with opened(gpu_settings(2, **WINDOW), count) as ranks:
        mean = ranks.prepared(FLOATS, strategy, "fused")
        for name in FLOATS:
            ranks.put(name, values)
        mean()
        expected = values.sum(0) / (1 if strategy == "deferred" else 2)
        for name in FLOATS:
            assert all((got == expected).all() for got in ranks.get(name)), name


def test_arenas_are_whole_pages_and_begin_as_zeros(gpu_settings, small):
    with trlow.Runtime(gpu_settings(2, **WINDOW), small.plan) as runtime:
        for arena in runtime.arenas:
            assert arena.base % 4096 == arena.nbytes % 4096 == 0
            assert not arena.copy_out(small.plan.span("W_BUCKET_0", "S_SCALAR_INT")).any()


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_training_ends_with_the_same_bytes_on_windows(gpu_settings, model):
    train, validation = load_digits()
    digests = set()
    for fields in (WINDOW, {}):
        settings = gpu_settings(2, global_batch_size=128, **fields)
        network = MODELS[model](train.classes)
        training = Training(lr=0.05, schedule="constant")
        with Task(settings, network, train, validation, training=training) as task:
            task.fit(1)
            digests.update(task.weights_digests())
    assert len(digests) == 1


def test_windows_are_registered_again_after_a_recovery(gpu_settings, small):
    """The step fails before any collective of it is issued, so nothing spins when it is aborted."""

    def broken(rank, stream):
        message = "no step"
        raise OSError(message)

    external = trlow.External("callback", (), (), broken)
    stage = trlow.Stage("S", trlow.Stream.COMP_1, external=external)
    with trlow.Runtime(gpu_settings(2, **WINDOW), small.plan) as runtime:
        replay = runtime.capture(small.feed_program())
        replay.run(5, fill)
        with pytest.raises(RankError, match="no step"):
            runtime.eager(trlow.Program.single("broken", (stage,)))
        assert replay.closed
        again = runtime.capture(small.mean_program())
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("factor", np.array([0.5], np.float32))
            arena.copy_in("early", np.full(1000, rank, np.float32))
        again.run(1)
        assert all((arena.copy_out("early") == 0.5).all() for arena in runtime.arenas)


def test_opening_and_closing_leaves_device_memory_flat(gpu_settings):
    settings = gpu_settings(2, **WINDOW)
    platform = Platform.open(settings)
    plan = make_plan(LARGE)
    free = []
    for _ in range(4):
        with trlow.Runtime(settings, plan, platform=platform) as runtime:
            ranks = Ranks(runtime)
            ranks.prepared(FLOATS, "deferred", "fused")()
        free.append([platform.memory(device)[0] for device in (0, 1)])
    lost = [free[1][device] - free[3][device] for device in (0, 1)]  # the first loads what stays
    assert max(lost) < plan.arena_nbytes / 2, free


def test_below_2_29_7_it_needs_a_word_for_a_hang_that_no_abort_ends(gpu_settings, small):
    settings = gpu_settings(2, arena="window")
    platform = Platform.open(settings)
    if platform.nccl.version >= ABORTABLE_SINCE:
        trlow.Runtime(settings, small.plan, platform=platform).close()
        return
    with pytest.raises(SettingsError, match=r"below 2\.29\.7.*allow_unabortable"):
        trlow.Runtime(settings, small.plan, platform=platform)


def test_one_rank_has_nobody_to_share_a_window_with(gpu_settings, small):
    with pytest.raises(SettingsError, match="one rank: there is no communicator"):
        trlow.Runtime(gpu_settings(1, **WINDOW), small.plan)
