"""Invariants 35, 37 and 39 where test_training.py leaves a place unseen."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from trlow.batches import Batches
from trlow.nn import bn, conv, fc, flatten, gap, maxpool, relu, seq

pytestmark = pytest.mark.timeout(90)

PLAIN = seq(conv(4, 3), relu(), conv(6, 3), relu(), maxpool(2), gap(), fc(7))
NORMED = seq(conv(4, 3), bn(), relu(), conv(6, 3), bn(), relu(), gap(), fc(7))
DENSE = seq(flatten(), fc(12), relu(), fc(8), relu(), fc(7))
MODELS = {"cnn": PLAIN, "mlp": DENSE, "norms": NORMED}


def feed_of(task, data, rows, scale, rates=()):
    """The first rows of `data` as one global batch, short if they are fewer."""
    ranks, local = task.compiled.world_size, task.compiled.network.local_batch
    scalars = task._scalars(metric_scale=scale)
    return Batches(data, np.arange(rows), ranks, local, scalars, rates)


def filled(feed, tail, label=0):
    """As `feed.fill`, with `tail` and `label` behind the real rows."""

    def fill(rank, step, slot):
        feed.fill(rank, step, slot)
        count = len(feed.rows(rank, step))
        slot["data"][count:] = tail
        slot["label"][count:] = label

    return fill


def copies(task, names):
    return [[a.copy_out(name).tobytes() for name in names] for a in task.runtime.arenas]


@pytest.mark.parametrize("replay", ["fused", "staged"])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_a_short_training_step_uses_its_real_rows_only(model, rows, replay, make_data, open_task):
    """Invariant 35 for gradients, weights and metrics; on some ranks no row is real."""
    data = make_data(8)
    seen = []
    for tail, label in ((0.0, 0), (1e9, 6), (-1e9, 3)):
        with open_task(MODELS[model], data, ranks=2, batch=8, replay=replay) as task:
            feed = feed_of(task, data, rows, 0.5, (0.1,))
            task.replays["train"].run(1, filled(feed, tail, label))
            parameters = task.compiled.parameters
            names = [p.name for p in parameters] + [p.gradient for p in parameters] + ["result"]
            assert task.runtime.arenas[0].copy_out("skip")[0] == 0
            assert any(task.runtime.arenas[1].copy_out(p.gradient).any() for p in parameters)
            seen.append(copies(task, names))
    assert seen[0] == seen[1] == seen[2]


def test_one_real_row_more_changes_a_short_training_step(make_data, open_task):
    """So the test above compares what depends on the rows."""
    data, seen = make_data(8), []
    for rows in (3, 4):
        with open_task(PLAIN, data, ranks=2, batch=8) as task:
            task.replays["train"].run(1, feed_of(task, data, rows, 0.5, (0.1,)).fill)
            seen.append(copies(task, ["conv0.weight", "result"]))
    assert seen[0] != seen[1]


def test_a_tail_that_is_counted_changes_a_short_training_step(make_data, open_task):
    """And so that its tail would show."""
    data, seen = make_data(8), []
    for tail in (0.0, 1e9):
        with open_task(PLAIN, data, ranks=2, batch=8) as task:
            honest = filled(feed_of(task, data, 3, 0.5, (0.1,)), tail)

            def fill(rank, step, slot, honest=honest):
                honest(rank, step, slot)
                slot["rows"][0] = 4

            task.replays["train"].run(1, fill)
            seen.append(copies(task, ["conv0.weight", "result"]))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
@pytest.mark.parametrize("model", MODELS)
def test_a_short_validation_batch_uses_its_real_rows_only(model, rows, make_data, open_task):
    """Invariant 35 for every kind of layer: 1e9 in each row of the tail changes no sum."""
    data = make_data(8)
    with open_task(MODELS[model], data, make_data(rows, seed=1), ranks=2, batch=8) as task:
        expected = task.validate()
        feed = feed_of(task, task.validation, rows, task.compiled.network.local_batch)
        seen = []
        for tail in (0.0, 1e9):
            task.replays["clear_metrics"].run(1)
            task.replays["validate"].run(1, filled(feed, tail))
            task.replays["validate_result"].run(1)
            seen.append([a.copy_out("accumulated") for a in task.runtime.arenas])
    assert all(np.array_equal(seen[0][0], sums) for sums in seen[0] + seen[1])
    loss, top1, top5 = (float(s) / rows for s in seen[1][0])
    assert (loss, top1, top5) == (expected.loss, expected.top1, expected.top5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("replay", ["fused", "staged"])
def test_statistics_are_equal_on_all_ranks_at_every_home(ranks, replay, make_data, open_task):
    """Invariant 37: running, next and folded ones; those of a batch are each rank's own."""
    data = make_data(24)
    with open_task(NORMED, data, ranks=ranks, batch=12, replay=replay) as task:
        plan = task.compiled.plan
        homes = {
            name: [t.name for region in regions for t in plan.tensors_in(region)]
            for name, regions in {
                "previous": ("B_PREV_MEAN", "B_PREV_VAR"),
                "next": ("B_NEXT_MEAN", "B_NEXT_VAR"),
                "folded": ("W_EQ_BIAS", "W_EQ_SCALE"),
                "batch": ("B_BATCH_MEAN", "B_BATCH_RSTD"),
            }.items()
        }
        assert all(len(names) == 4 for names in homes.values())
        was = copies(task, homes["previous"])[0]
        for step in range(2):
            feed = feed_of(task, data, 12 * (step + 1), 1 / ranks, (0.1, 0.1))
            task.replays["train"].run(1, feed.fill)
        task.replays["bn_inference"].run(1)
        found = {home: copies(task, names) for home, names in homes.items()}
    for home in ("previous", "next", "folded"):
        assert all(rank == found[home][0] for rank in found[home]), home
    assert found["previous"] == found["next"]
    assert found["previous"][0] != was
    assert found["batch"][0] != found["batch"][1]


def test_another_seed_gives_other_weights(make_data, open_task, persistent):
    """Without this, equal runs of one seed (invariant 39) could be runs of any seed."""
    data, seen = make_data(16), []
    for seed in (1, 2):
        with open_task(NORMED, data, ranks=2, batch=8, seed=seed) as task:
            task.fit(1)
            seen.append(persistent(task))
    same = [name for name in seen[0] if seen[0][name].tobytes() == seen[1][name].tobytes()]
    assert same == []


def test_two_processes_with_one_seed_are_byte_equal():
    """Invariant 39, with other hashes of strings and another number of host workers."""
    code = (
        "import sys\n"
        "from trlow.data import load_digits\n"
        "from trlow.nn import bn, conv, fc, gap, relu, seq\n"
        "from trlow.settings import Settings\n"
        "from trlow.task import Task\n"
        "model = seq(conv(4, 3), bn(), relu(), conv(4, 3), relu(), gap(), fc(10))\n"
        "settings = Settings(device='host', host_devices=2, seed=3, global_batch_size=64,\n"
        "                    host_workers=int(sys.argv[1]), host_schedule_seed=int(sys.argv[2]))\n"
        "with Task(settings, model, *load_digits()) as task:\n"
        "    task.fit(1)\n"
        "    print(task.weights_digests(), task.history[0].train_loss)\n"
    )
    seen = []
    for hash_seed, workers, schedule in (("1", "1", "0"), ("2", "3", "5")):
        done = subprocess.run(
            [sys.executable, "-c", code, workers, schedule],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout)
    assert seen[0] == seen[1]
