"""What training keeps on several ranks of the host device."""

import numpy as np
import pytest

from trlow.batches import Batches, epoch_order
from trlow.data import Dataset
from trlow.errors import TrlowError
from trlow.nn import bn, conv, fc, flatten, gap, maxpool, relu, seq

pytestmark = pytest.mark.timeout(90)

PLAIN = seq(conv(4, 3), relu(), conv(6, 3), relu(), maxpool(2), gap(), fc(7))
NORMED = seq(conv(4, 3), bn(), relu(), conv(6, 3), bn(), relu(), gap(), fc(7))
DENSE = seq(flatten(), fc(12), relu(), fc(8), relu(), fc(7))


def batches(task, scale, rates, rows=None):
    order = np.arange(task.global_batch_size * len(rates)) if rows is None else rows
    return Batches(
        task.train,
        order % task.train.rows,
        task.compiled.world_size,
        task.compiled.network.local_batch,
        task._scalars(metric_scale=scale),
        tuple(rates),
    )


def train(task, rates):
    """Train one step a rate, on consecutive rows."""
    feed = batches(task, 1.0 / task.compiled.world_size, rates)
    task.replays["train"].run(len(rates), feed.fill)


def everything(task, persistent):
    return [persistent(task, rank) for rank in range(task.compiled.world_size)]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("model", [PLAIN, DENSE], ids=["cnn", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_four_ranks_of_batch_b_equal_one_rank_of_batch_4b(model, optimizer, make_data, open_task):
    """Invariant 33, over 20 steps."""
    data = make_data(160)
    states = []
    for ranks in (1, 4):
        with open_task(
            model, data, ranks=ranks, batch=16, optimizer=optimizer, weight_decay=1e-3
        ) as task:
            train(task, [0.02] * 20)
            states.append(
                {p.name: task.runtime.arenas[0].copy_out(p.name) for p in task.compiled.parameters}
            )
    for name in states[0]:
        # Sums differ in order alone; measured 2e-7 at most, where weights moved by up to 0.5.
        np.testing.assert_allclose(
            states[0][name], states[1][name], rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fused_equals_staged_and_any_schedule_byte_for_byte(
    ranks, make_data, open_task, persistent
):
    """Invariants 26 and 39; a shuffled order of what is ready would show a missing edge."""
    data = make_data(48)
    states = []
    for replay, schedule_seed in (
        ("fused", 0),
        ("fused", 0),
        ("staged", 0),
        ("fused", 11),
        ("staged", 12),
    ):
        with open_task(
            NORMED, data, ranks=ranks, batch=12, replay=replay, schedule_seed=schedule_seed
        ) as task:
            history = task.fit(2)
            states.append(persistent(task))
            losses = [(e.train_loss, e.val_loss, e.val_top1) for e in history]
            states[-1]["losses"] = np.array(losses)
    for other in states[1:]:
        assert_equal(states[0], other)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_everything_persistent_is_equal_on_all_ranks_after_every_step(
    ranks, make_data, open_task, persistent
):
    """Invariants 34 and 37."""
    with open_task(NORMED, make_data(48), ranks=ranks, batch=12) as task:
        before = persistent(task)
        for step in range(4):
            feed = batches(task, 1.0 / ranks, [0.1], np.arange(12 * step, 12 * step + 12))
            task.replays["train"].run(1, feed.fill)
            states = everything(task, persistent)
            for other in states[1:]:
                assert_equal(states[0], other)
            moved = [n for n in before if before[n].tobytes() != states[0][n].tobytes()]
            assert {"conv0.weight", "fc7.bias", "bn4.weight", "prev.bn1.var"} <= set(moved)
            before = states[0]


def test_running_statistics_are_the_mean_of_the_ranks_own(make_data, open_task, reference):
    """Each rank moves the statistics by its own batch; what follows is the mean over ranks."""
    ranks, data = 2, make_data(16)
    with open_task(NORMED, data, ranks=ranks, batch=16) as task:
        arena = task.runtime.arenas[0]
        state = {p.name: arena.copy_out(p.name) for p in task.compiled.parameters}
        train(task, [0.0])
        found = {
            what: arena.copy_out(f"prev.bn1.{what}").astype(np.float64) for what in ("mean", "var")
        }
    means, variances = [], []
    for rows in np.arange(16).reshape(ranks, -1):
        statistics = {}
        reference(NORMED).logits(state, data.features[rows], statistics)
        mean, var, count = statistics[1]
        means.append(0.9 * 0 + 0.1 * mean)
        variances.append(0.9 * 1 + 0.1 * var * count / (count - 1))
    np.testing.assert_allclose(found["mean"], np.mean(means, 0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["var"], np.mean(variances, 0), rtol=1e-5)


def test_the_broadcast_makes_all_ranks_equal_whatever_was_there(make_data, open_task, persistent):
    """Invariant 38."""
    generator = np.random.default_rng(0)
    with open_task(NORMED, make_data(16), ranks=4, batch=8) as task:
        for rank in range(4):
            for name, values in persistent(task, rank).items():
                noise = generator.integers(0, 256, values.nbytes, np.uint8).view(values.dtype)
                task.runtime.arenas[rank].copy_in(name, noise.reshape(values.shape))
        root = persistent(task, 0)
        task.replays["broadcast"].run(1)
        for state in everything(task, persistent):
            assert_equal(root, state)


def test_the_same_batch_without_an_update_gives_the_same_loss_and_gradients(make_data, open_task):
    """Invariant 40: what is added to is cleared first."""
    with open_task(NORMED, make_data(16), ranks=2, batch=16) as task:
        arena = task.runtime.arenas[1]
        names = ["result", *(p.gradient for p in task.compiled.parameters)]
        seen = []
        for _ in range(2):
            train(task, [0.0])
            seen.append({name: arena.copy_out(name) for name in names})
        assert_equal(*seen)
        assert seen[0]["grad.conv0.weight"].any()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_a_rate_of_zero_leaves_every_weight_byte(optimizer, make_data, open_task, persistent):
    """Invariant 24: between steps that do move them, with moments that are not zero."""
    with open_task(
        NORMED, make_data(48), ranks=2, batch=16, optimizer=optimizer, weight_decay=0.01
    ) as task:
        train(task, [0.1, 0.1])
        before = persistent(task)
        train(task, [0.0])
        after = persistent(task)
        weights = [p.name for p in task.compiled.parameters]
        assert_equal({n: before[n] for n in weights}, {n: after[n] for n in weights})
        assert before["prev.bn1.mean"].tobytes() != after["prev.bn1.mean"].tobytes()
        train(task, [0.1])
        assert before["conv0.weight"].tobytes() != persistent(task)["conv0.weight"].tobytes()


@pytest.mark.parametrize("model", [NORMED, DENSE], ids=["cnn", "mlp"])
@pytest.mark.parametrize(("rows", "ranks"), [(13, 1), (13, 2), (17, 4), (5, 4), (16, 2)])
def test_validation_counts_every_row_once(model, rows, ranks, make_data, open_task, reference):
    """Invariant 36: sums over real rows, on all ranks, also where the last ranks have none."""
    data, validation = make_data(16), make_data(rows, seed=1)
    with open_task(model, data, validation, ranks=ranks, batch=8) as task:
        train(task, [0.05] * 3)
        found = task.validate()
        again = task.validate()
        sums = [arena.copy_out("accumulated") for arena in task.runtime.arenas]
        arena = task.runtime.arenas[0]
        plan = task.compiled.plan
        state = {t.name: arena.copy_out(t.name) for t in plan.tensors if t.name[:4] != "grad"}
    assert found == again
    assert all(np.array_equal(sums[0], other) for other in sums)
    loss, top1, top5 = reference(model).metrics(state, validation.features, validation.labels)
    assert found.loss == pytest.approx(loss, rel=1e-4)
    assert found.top1 == pytest.approx(top1, abs=1e-6)
    assert found.top5 == pytest.approx(top5, abs=1e-6)


def test_padding_rows_of_a_short_batch_count_for_nothing(make_data, open_task):
    """Whatever lies behind the real rows of the pinned slot changes no sum."""
    data, validation = make_data(16), make_data(5, seed=1)
    with open_task(DENSE, data, validation, ranks=2, batch=8) as task:
        expected = task.validate()
        feed = batches(task, 4.0, [0.0], np.arange(5))
        feed = Batches(validation, feed.order, 2, 4, feed.scalars)

        def fill(rank, step, slot):
            feed.fill(rank, step, slot)
            slot["data"][len(feed.rows(rank, step)) :] = 1e9

        task.replays["clear_metrics"].run(1)
        task.replays["validate"].run(1, fill)
        task.replays["validate_result"].run(1)
        sums = task.runtime.arenas[1].copy_out("accumulated")
        assert tuple(float(s) / 5 for s in sums) == (expected.loss, expected.top1, expected.top5)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    poisoned, value, make_data, open_task, persistent
):
    data = make_data(12)
    data.features[4 * poisoned + 1, 2, 2, 0] = value
    with open_task(NORMED, data, ranks=3, batch=12) as task:
        before = everything(task, persistent)
        train(task, [0.1])
        for arena in task.runtime.arenas:
            assert arena.copy_out("skip")[0] == 1
        for one, other in zip(before, everything(task, persistent), strict=True):
            assert_equal(one, other)
        data.features[4 * poisoned + 1, 2, 2, 0] = 0.0
        train(task, [0.1])
        for arena in task.runtime.arenas:
            assert arena.copy_out("skip")[0] == 0
        assert before[0]["conv0.weight"].tobytes() != persistent(task)["conv0.weight"].tobytes()


def test_skipped_steps_are_counted_and_leave_the_mean_loss_alone(make_data, open_task):
    data = make_data(32)
    order = epoch_order(32, 8, 0, 0)
    data.features[order[9]] = np.nan  # a row of the second of four steps
    validation = make_data(8, seed=1)
    with open_task(DENSE, data, validation, ranks=2, batch=8, lr=0.0, momentum=0.0) as task:
        (epoch,) = task.fit(1)
        report = task.report()
    assert epoch.skipped_steps == 1
    assert report["epochs"][0]["skipped_steps"] == 1
    with open_task(DENSE, data, validation, ranks=2, batch=8) as task:
        losses = []
        for step in (0, 2, 3):
            feed = batches(task, 0.5, [0.0], order[8 * step : 8 * step + 8])
            task.replays["train"].run(1, feed.fill)
            losses.append(task.runtime.arenas[0].copy_out("result")[0] / 2)
    assert epoch.train_loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_validation_counts_all_rows_after_a_skipped_step(make_data, open_task):
    data, validation = make_data(8), make_data(11, seed=1)
    with open_task(NORMED, data, validation, ranks=2, batch=8) as task:
        expected = task.validate()
        data.features[3] = np.nan
        train(task, [0.1])
        assert task.runtime.arenas[0].copy_out("skip")[0] == 1
        assert task.validate() == expected


def test_an_epoch_with_no_finite_step_is_an_error(make_data, open_task):
    data = make_data(16)
    data.features[:] = np.nan
    with open_task(DENSE, data, make_data(8), ranks=2, batch=8) as task:
        with pytest.raises(TrlowError, match=r"epoch 0: none of its 2 steps .* learning rate"):
            task.fit(1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_frozen_layers_keep_their_bytes_and_ranks_stay_equal(
    ranks, make_data, open_task, persistent
):
    """Invariant 16: batch norm and the classifier are still reduced in the second bucket."""
    with open_task(
        NORMED, make_data(32), ranks=ranks, batch=8, frozen=(0, 4), weight_decay=0.01
    ) as task:
        before = persistent(task)
        train(task, [0.1] * 4)
        states = everything(task, persistent)
        for other in states[1:]:
            assert_equal(states[0], other)
        for parameter in task.compiled.parameters:
            moved = before[parameter.name].tobytes() != states[0][parameter.name].tobytes()
            assert moved == (parameter.layer not in (0, 4)), parameter.name
        bucket = task.compiled.plan.buckets(task.compiled.network.frozen_gradients)[1]
        assert (bucket.first, bucket.last) == ("G_BN_BIAS", "G_FC_WEIGHT")


def test_metrics_of_an_epoch_are_means_over_its_rows(make_data, open_task, reference):
    data = make_data(24)
    with open_task(DENSE, data, ranks=2, batch=8, lr=0.0) as task:
        state = {p.name: task.runtime.arenas[0].copy_out(p.name) for p in task.compiled.parameters}
        (epoch,) = task.fit(1)
        accumulated = task.runtime.arenas[0].copy_out("accumulated")
    loss, top1, top5 = reference(DENSE).metrics(state, data.features, data.labels)
    assert epoch.train_loss == pytest.approx(loss, rel=1e-5)
    assert epoch.val_loss == pytest.approx(loss, rel=1e-5)
    assert (epoch.val_top1, epoch.val_top5) == pytest.approx((top1, top5))
    assert accumulated[0] / 24 == pytest.approx(loss, rel=1e-5)


def test_every_rank_takes_its_own_rows_of_one_order():
    features = np.arange(20, dtype=np.float32).reshape(20, 1, 1, 1)
    labels = np.arange(20, dtype=np.int32) % 5
    data = Dataset("count", features, labels, 5)
    order = epoch_order(20, 8, seed=3, epoch=1)
    assert len(order) == 16
    assert len(set(order.tolist())) == 16
    assert not np.array_equal(order, epoch_order(20, 8, seed=3, epoch=2))
    assert not np.array_equal(order, epoch_order(20, 8, seed=4, epoch=1))
    feed = Batches(data, order, 2, 4, {}, (0.5, 0.25), first_step=6)
    seen = []
    for step in (6, 7):
        for rank in range(2):
            slot = {
                "data": np.full((4, 1, 1, 1), -1, np.float32),
                "label": np.full(4, -1, np.int32),
                "rows": np.zeros(1, np.float32),
                "lr": np.zeros(1, np.float32),
            }
            feed.fill(rank, step, slot)
            assert slot["lr"][0] == (0.5 if step == 6 else 0.25)
            assert slot["rows"][0] == 4
            seen += slot["data"].ravel().astype(int).tolist()
            assert np.array_equal(slot["label"], labels[slot["data"].ravel().astype(int)])
    assert seen == order.tolist()
