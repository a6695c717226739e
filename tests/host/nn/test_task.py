"""The task as its user meets it: what it refuses and reports, and how well digits are learned."""

import hashlib
import json

import pytest

from trlow.data import load_digits
from trlow.errors import DataError, ModelError, SettingsError, UsageError
from trlow.nn import Variant, cnn, compile_model, conv, fc, flatten, gap, mlp, relu, seq
from trlow.runtime import Runtime
from trlow.schedule import Training
from trlow.settings import Settings
from trlow.task import Task

pytestmark = pytest.mark.timeout(90)

SMALL = seq(flatten(), fc(8), relu(), fc(7))
REPORT_KEYS = [
    "trlow",
    "device",
    "libraries",
    "world_size",
    "global_batch_size",
    "local_batch_size",
    "dropped_rows",
    "seed",
    "model",
    "parameters",
    "plan",
    "replay",
    "epochs",
    "weights_digest",
]


@pytest.mark.parametrize("replay", ["fused", "staged"])
def test_the_report_says_what_ran(replay, make_data, open_task):
    data = make_data(27)
    with open_task(
        SMALL, data, make_data(9, seed=1), ranks=2, batch=8, seed=5, replay=replay
    ) as task:
        task.fit(2)
        report = json.loads(json.dumps(task.report(), allow_nan=False))
        plan = task.compiled.plan
        digests = []
        for arena in task.runtime.arenas:
            weights = [t for t in plan.tensors if t.region.startswith("W_")]
            digests.append(
                hashlib.sha256(b"".join(arena.copy_out(t.name).tobytes() for t in weights))
            )
    assert list(report) == REPORT_KEYS
    assert report["device"] == "host"
    assert set(report["libraries"]) == {"cudart", "driver", "nccl"}
    assert all({"path", "version"} == set(entry) for entry in report["libraries"].values())
    assert (report["world_size"], report["global_batch_size"]) == (2, 8)
    assert (report["local_batch_size"], report["dropped_rows"], report["seed"]) == (4, 3, 5)
    assert report["parameters"] == 36 * 8 + 8 + 8 * 7 + 7
    assert report["plan"]["fingerprint"] == plan.fingerprint()
    gradient_nbytes = 4 * report["parameters"]
    assert report["plan"]["traffic_nbytes_per_rank"] == 2 * gradient_nbytes * 1 // 2
    assert [b["stage"] for b in report["plan"]["buckets"]] == ["DEEP_COMM", "FIRST_COMM"]
    assert [sorted(e) for e in report["epochs"]] == [
        ["seconds", "train_loss", "val_loss", "val_top1", "val_top5"]
    ] * 2
    assert report["weights_digest"] == [d.hexdigest() for d in digests]
    assert len(set(report["weights_digest"])) == 1
    assert report["replay"]["mode"] == replay
    assert report["replay"]["host_syncs_per_step"] == 0
    if replay == "fused":
        assert report["replay"]["launches_per_step"] == 1
        assert report["replay"]["graphs_per_rank"] == 2
    else:
        assert report["replay"]["launches_per_step"] == len(
            task.compiled.programs["train"].phases[0]
        )


def test_one_rank_loads_no_nccl(make_data, open_task):
    """Invariant 32."""
    with open_task(SMALL, make_data(16), ranks=1) as task:
        task.fit(1)
        assert set(task.report()["libraries"]) == {"cudart", "driver"}
        assert task.report()["plan"]["traffic_nbytes_per_rank"] == 0


def test_progress_reports_every_epoch(make_data, open_task):
    seen = []
    with open_task(SMALL, make_data(16)) as task:
        task.fit(3, seen.append)
        assert [(p.done, p.epochs) for p in seen] == [(1, 3), (2, 3), (3, 3)]
        assert [p.epoch for p in seen] == task.history


def test_two_batch_sizes_and_two_resolutions_capture_each_communication_once(make_data):
    """Invariant 32b: staged communication stages depend on ranges and world size alone."""
    model = seq(conv(3, 3), relu(), conv(4, 3), relu(), gap(), fc(7))
    compiled = compile_model(
        model,
        input_shape=(6, 6, 1),
        local_batch=4,
        world_size=2,
        variants=[Variant("small", 2, 6, 6), Variant("large", 4, 9, 7)],
    )
    settings = Settings(device="host", host_devices=2)
    with Runtime(settings, compiled.plan) as runtime:
        replays = {}
        for name in ("train", "train:small", "train:large"):
            variant = name.partition(":")[2] or None
            replays[name] = runtime.capture(compiled.programs[name], "staged", variant=variant)
        for name in ("DEEP_COMM", "FIRST_COMM"):
            assert runtime.captured[name] == 1
        assert runtime.captured["DEEP_FWD_BWD"] == 2 * 3
        shapes = set()

        def fill(rank, step, slot):
            shapes.add(slot["data"].shape)
            for name in ("data", "label", "lr", "mu", "weight_decay"):
                slot[name][...] = 0
            slot["rows"][0] = len(slot["data"])
            slot["grad_scale"][0] = slot["metric_scale"][0] = 0.5

        for replay in replays.values():
            replay.run(3, fill)
        assert shapes == {(4, 6, 6, 1), (2, 6, 6, 1), (4, 9, 7, 1)}


def make_task(make_data, model=SMALL, rows=16, *, settings=None, **arguments):
    data = make_data(rows)
    settings = {"device": "host", "global_batch_size": 8, "host_devices": 2} | (settings or {})
    validation = arguments.pop("validation", data)
    return Task(Settings(**settings), model, data, validation, **arguments)


def test_a_batch_larger_than_the_data_is_refused(make_data):
    with pytest.raises(DataError, match=r"17 rows is larger than noise16 .* use at most 16"):
        make_task(make_data, settings={"global_batch_size": 17})


def test_a_model_that_does_not_fit_the_data_is_refused(make_data):
    with pytest.raises(ModelError, match="ends in 8 classes, noise16 has 7"):
        make_task(make_data, seq(flatten(), fc(8)))
    with pytest.raises(ModelError, match=r"layer 0 fc: input shape \(6, 6, 1\)"):
        make_task(make_data, seq(fc(7)))


def test_two_kinds_of_data_are_refused(make_data):
    with pytest.raises(DataError, match=r"\(6, 6, 1\).*\(5, 6, 1\)"):
        make_task(make_data, validation=make_data(8, (5, 6, 1)))


def test_a_batch_that_the_ranks_do_not_divide_is_refused_before_memory_is_taken(make_data):
    task = make_task(make_data, settings={"global_batch_size": 7})
    with pytest.raises(SettingsError, match=r"7 .* world size 2"):
        task.compile()
    task.close()


@pytest.mark.parametrize("epochs", [0, -1, 1.5, float("nan"), True])
def test_epochs_must_be_a_positive_integer(epochs, make_data):
    with make_task(make_data) as task:
        with pytest.raises(SettingsError, match="epochs="):
            task.fit(epochs)


def test_a_warm_up_longer_than_the_fit_is_refused(make_data):
    with make_task(make_data, training=Training(warmup_epochs=3)) as task:
        with pytest.raises(SettingsError, match="warm-up of 3 epochs is longer than the 2"):
            task.fit(2)


def test_a_task_says_what_is_missing(make_data):
    task = make_task(make_data)
    with pytest.raises(UsageError, match=r"call compile\(\) first"):
        task.validate()
    task.compile()
    with pytest.raises(UsageError, match="compiled already"):
        task.compile()
    task.close()
    task.close()
    with pytest.raises(UsageError, match="closed"):
        task.compile()
    with pytest.raises(UsageError, match="close"):
        task.report()


def test_fit_compiles_by_itself_and_goes_on_where_it_was(make_data):
    with make_task(make_data, training=Training(lr=0.01)) as task:
        first = task.fit(2)
        second = task.fit(1)
        assert task.history == [*first, *second]
        assert second[0].train_loss < first[0].train_loss


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("model", "least"), [(cnn(), 0.975), (mlp(), 0.95)], ids=["cnn", "mlp"])
def test_digits_are_learned_on_four_ranks(model, least, seed):
    """With the defaults, in 12 epochs."""
    train, validation = load_digits()
    with Task(Settings(device="host", seed=seed), model, train, validation) as task:
        history = task.fit(12)
        assert history[-1].val_top1 >= least
        assert len(set(task.weights_digests())) == 1
        assert task.dropped_rows == 1437 % 128
