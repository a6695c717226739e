"""`trlow train` on the host device: what it prints, what it reports, how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trlow as trlow_package
from trlow import data
from trlow.cli.parser import build
from trlow.cli.train import settings_of
from trlow.range_op import MEAN_STRATEGIES
from trlow.report import Epoch
from trlow.task import Task

REPORT_KEYS = [
    "trlow", "device", "libraries", "world_size", "global_batch_size", "local_batch_size",
    "dropped_rows", "seed", "model", "parameters", "plan", "replay",
    "epochs", "weights_digest",
]  # fmt: skip
QUICK = ("train", "--device", "host", "--model", "mlp", "--epochs", 1)


def train(trlow, path, *arguments) -> dict:
    outcome = trlow(*QUICK, "--report", path, *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_report_has_exactly_the_promised_keys(trlow, tmp_path):
    report = train(trlow, tmp_path / "report.json", "--ranks", 2, "--seed", 7)
    assert list(report) == REPORT_KEYS
    assert report["device"] == "host"
    assert (report["world_size"], report["seed"], report["model"]) == (2, 7, "mlp")
    assert (report["global_batch_size"], report["local_batch_size"]) == (128, 64)
    assert report["dropped_rows"] == 1437 % 128
    assert set(report["libraries"]) == {"cudart", "driver", "nccl"}
    for library in report["libraries"].values():
        assert list(library) == ["path", "version"]
    assert list(report["plan"]) == [
        "fingerprint", "arena_nbytes", "traffic_nbytes_per_rank", "buckets",
    ]  # fmt: skip
    for bucket in report["plan"]["buckets"]:
        assert list(bucket) == ["stage", "first", "last", "offset", "nbytes"]
    assert list(report["replay"]) == [
        "mode", "graphs_per_rank", "launches_per_step", "host_syncs_per_step",
    ]  # fmt: skip
    (epoch,) = report["epochs"]
    assert list(epoch) == ["train_loss", "val_loss", "val_top1", "val_top5", "seconds"]
    assert all(math.isfinite(value) for value in epoch.values())
    assert 0 <= epoch["val_top1"] <= epoch["val_top5"] <= 1
    assert len(report["weights_digest"]) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in report["weights_digest"])
    assert len(set(report["weights_digest"])) == 1


def test_fused_launches_once_a_step_and_never_drains(trlow, tmp_path):
    replay = train(trlow, tmp_path / "report.json", "--replay", "fused")["replay"]
    assert replay == {
        "mode": "fused",
        "graphs_per_rank": 2,
        "launches_per_step": 1,
        "host_syncs_per_step": 0,
    }


def test_staged_launches_more_and_ends_with_the_same_weights(trlow, tmp_path):
    fused = train(trlow, tmp_path / "fused.json", "--replay", "fused")
    staged = train(trlow, tmp_path / "staged.json", "--replay", "staged")
    assert staged["replay"]["mode"] == "staged"
    assert staged["replay"]["launches_per_step"] > 1
    assert staged["replay"]["host_syncs_per_step"] == 0
    assert staged["weights_digest"] == fused["weights_digest"]


@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_every_mean_strategy_ends_with_the_same_weights_on_two_ranks(trlow, tmp_path, strategy):
    report = train(trlow, tmp_path / "report.json", "--ranks", 2, "--mean-strategy", strategy)
    named = dict.fromkeys(("DEEP_COMM", "FIRST_COMM"), strategy)
    assert report.get("mean_strategy") == (None if strategy == "deferred" else named)
    default = train(trlow, tmp_path / "default.json", "--ranks", 2)
    assert "mean_strategy" not in default
    assert report["weights_digest"] == default["weights_digest"]
    assert report["epochs"][0]["train_loss"] == default["epochs"][0]["train_loss"]


def test_a_window_arena_ends_with_the_same_weights(trlow, tmp_path):
    words = ("--arena", "window", "--allow-unabortable")
    window = train(trlow, tmp_path / "window.json", "--ranks", 2, *words)
    plain = train(trlow, tmp_path / "plain.json", "--ranks", 2)
    assert window["weights_digest"] == plain["weights_digest"]


def test_a_seed_gives_the_same_bytes_again_and_another_seed_others(trlow, tmp_path):
    digests = [
        train(trlow, tmp_path / f"{index}.json", "--seed", seed)["weights_digest"][0]
        for index, seed in enumerate((3, 3, 4))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_train_and_plan_agree_on_the_plan(trlow, tmp_path):
    report = train(trlow, tmp_path / "report.json", "--ranks", 2, "--optimizer", "sgd")
    words = ("--model", "mlp", "--ranks", 2, "--optimizer", "sgd")
    plan = json.loads(trlow("plan", "--json", *words).out)
    assert report["plan"]["fingerprint"] == plan["fingerprint"]
    assert report["plan"]["arena_nbytes"] == plan["arena_nbytes"]
    assert report["plan"]["traffic_nbytes_per_rank"] == plan["traffic_nbytes_per_rank"]
    ranges = {bucket.pop("stage"): bucket for bucket in map(dict, report["plan"]["buckets"])}
    assert ranges == plan["ranges"]


def test_what_a_person_reads(trlow, tmp_path):
    outcome = trlow(*QUICK, "--ranks", 2, "--epochs", 2)
    assert outcome.code == 0
    assert "2 ranks on host of 64 rows each" in outcome.out
    assert f"each epoch drops {1437 % 128} of 1437 training rows" in outcome.out
    assert re.search(r"epoch 2/2: train loss \d\.\d{4}, val loss", outcome.out)
    assert "equal on all ranks" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_divides_the_rows_drops_none_and_says_nothing(trlow):
    outcome = trlow(*QUICK, "--ranks", 1, "--global-batch-size", 479)
    assert outcome.code == 0
    assert "drops" not in outcome.out


def test_without_ranks_or_gpus_the_host_has_four(trlow, tmp_path):
    assert train(trlow, tmp_path / "report.json")["world_size"] == 4


def test_a_list_of_devices_makes_one_rank_each(trlow, tmp_path):
    report = train(trlow, tmp_path / "report.json", "--gpus", "1,3")
    assert report["world_size"] == 2


def test_three_ranks_with_the_flag(trlow, tmp_path):
    words = ("--ranks", 3, "--any-world-size", "--global-batch-size", 129)
    report = train(trlow, tmp_path / "report.json", *words)
    assert len(set(report["weights_digest"])) == 1
    assert report["world_size"] == 3


def test_idx_files_train_too(trlow, tmp_path):
    import gzip
    import struct

    import numpy as np

    random = np.random.RandomState(0)
    for prefix, rows in (("train", 64), ("t10k", 10)):
        for kind, shape in (("images-idx3", (rows, 6, 6)), ("labels-idx1", (rows,))):
            values = random.randint(0, 10, shape).astype(np.uint8)
            header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
            path = tmp_path / f"{prefix}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes()))
    words = ("--data", f"idx:{tmp_path}", "--ranks", 2, "--global-batch-size", 32)
    report = train(trlow, tmp_path / "report.json", *words, "--model", "cnn")
    assert report["dropped_rows"] == 0


def test_an_error_while_running_is_one_line_and_exit_code_1(trlow):
    outcome = trlow(*QUICK, "--epochs", 2, "--lr", "1e30")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "learning rate" in outcome.err


@pytest.mark.parametrize("seconds", [0.6, 2.0])
def test_ctrl_c_ends_within_seconds_with_130_and_one_line(seconds):
    words = ["train", "--device", "host", "--epochs", "10000"]
    command = [sys.executable, "-W", "error", "-m", "trlow", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        child.stdout.readline()  # compiled and captured: training begins
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = child.communicate(timeout=30)
        assert time.monotonic() - began < 10
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert errors == "trlow: error: interrupted\n"


@pytest.mark.parametrize("entry", [["-m", "trlow"], ["trlow"]])
def test_ctrl_c_while_the_commands_are_imported_is_130_and_one_line(tmp_path, entry):
    """A module that the command line imports sends the interrupt in its stead."""
    (tmp_path / "argparse.py").write_text(
        "import sys\n"
        "if 'trlow.cli' in sys.modules:\n"
        "    raise KeyboardInterrupt\n"
        "raise ImportError('too early for this test')\n"
    )
    if entry == ["trlow"]:
        (tmp_path / "trlow").write_text("from trlow.cli import main\nraise SystemExit(main())\n")
        entry = [str(tmp_path / "trlow")]
    package = str(Path(trlow_package.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"}
    command = [sys.executable, *entry, "plan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (130, "trlow: error: interrupted\n")


@pytest.mark.parametrize("entry", [["-m", "trlow"], ["-W", "error", "-Bm", "trlow"], ["trlow"]])
def test_ctrl_c_while_the_package_is_imported_is_130_and_one_line(tmp_path, entry):
    """numpy sends the interrupt in its stead, and hides it; another program keeps its traceback."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise AssertionError('no interrupt')\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('numpy is broken') from None\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text("import trlow\n")
    if entry == ["trlow"]:
        (tmp_path / "trlow").write_text("from trlow.cli import main\nraise SystemExit(main())\n")
        entry = [str(tmp_path / "trlow")]
    package = str(Path(trlow_package.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"}

    def run(*words):
        command = [sys.executable, *words, "plan"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    done = run(*entry)
    assert (done.returncode, done.stderr) == (130, "trlow: error: interrupted\n")
    assert "ImportError: numpy is broken" in run("-m", "other", "-m", "trlow").stderr


def test_the_environment_applies_unless_the_option_is_given(monkeypatch):
    values = {"SEED": "3", "DEVICE": "host", "GLOBAL_BATCH_SIZE": "96", "ANY_WORLD_SIZE": "1"}
    for name, value in values.items():
        monkeypatch.setenv(f"TRLOW_{name}", value)
    settings = settings_of(build("0").parse_args(["train"]))
    assert (settings.seed, settings.device) == (3, "host")
    assert (settings.global_batch_size, settings.any_world_size) == (96, True)
    words = ["train", "--seed", "4", "--device", "auto", "--global-batch-size", "64"]
    settings = settings_of(build("0").parse_args(words))
    assert (settings.seed, settings.device, settings.global_batch_size) == (4, "auto", 64)


def test_plan_follows_the_same_variables_as_train(trlow, monkeypatch):
    def arena() -> int:
        return json.loads(trlow("plan", "--json").out)["arena_nbytes"]

    default = arena()
    monkeypatch.setenv("TRLOW_GLOBAL_BATCH_SIZE", "256")
    assert arena() > default


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_cnn_learns_the_digits_with_every_seed(trlow, tmp_path, seed):
    pytest.importorskip("sklearn", reason="needs the extra trlow[data]")
    words = ("--device", "host", "--ranks", 4, "--data", "digits", "--model", "cnn")
    path = tmp_path / "report.json"
    outcome = trlow("train", *words, "--epochs", 12, "--seed", seed, "--report", path)
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["epochs"][-1]["val_top1"] >= 0.975
    assert len(set(report["weights_digest"])) == 1


def test_the_mlp_learns_the_digits(trlow, tmp_path):
    path = tmp_path / "report.json"
    words = ("--device", "host", "--model", "mlp", "--epochs", 12, "--report", path)
    assert trlow("train", *words).code == 0
    assert json.loads(path.read_text())["epochs"][-1]["val_top1"] >= 0.95


def test_a_failing_epoch_leaves_no_report_and_keeps_an_old_one(trlow, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")
    assert trlow(*QUICK, "--epochs", 2, "--lr", "1e30", "--report", path).code == 1
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_loss_that_is_no_number_is_null_in_the_report(trlow, tmp_path):
    (epoch,) = train(trlow, tmp_path / "report.json", "--lr", "1e30")["epochs"]
    assert epoch["val_loss"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_steps_that_were_skipped_are_said(trlow, monkeypatch):
    def fit(self, epochs, progress):
        epoch = Epoch(1.0, 1.0, 0.5, 0.9, 0.1, skipped_steps=3)
        self.history.append(epoch)
        from trlow.report import Progress

        progress(Progress(1, epochs, 11, 11, epoch))

    one_epoch_at_least = Task.fit

    def fit_after_one(self, epochs, progress):
        one_epoch_at_least(self, 1, None)  # so that the report has counted calls
        fit(self, epochs, progress)

    monkeypatch.setattr(Task, "fit", fit_after_one)
    outcome = trlow(*QUICK)
    assert outcome.code == 0
    assert "3 steps skipped" in outcome.out


def test_the_digits_are_what_is_trained_by_default(trlow, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(data, "load", lambda spec: asked.append(spec) or data.load_digits())
    train(trlow, tmp_path / "report.json")
    assert asked == ["digits"]


HUNG = """
import sys
from trlow.cli import main
from trlow.errors import RankError
from trlow.task import Task

def fit(self, epochs, progress):
    raise RankError("a rank did not arrive", rank=1, step=3, stage="DEEP_COMM")

Task.fit = fit
Task.dead = property(lambda self: {dead})
sys.exit(main(["train", "--device", "host", "--model", "mlp"]))
"""


@pytest.mark.parametrize(("dead", "code"), [(True, 70), (False, 1)])
def test_a_rank_error_ends_with_70_only_where_recovery_failed(dead, code):
    command = [sys.executable, "-W", "error", "-c", HUNG.format(dead=dead)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert "a rank did not arrive (rank 1, step 3, stage DEEP_COMM)" in done.stderr


def test_a_trace_shows_the_overlap_and_the_report_what_communication_costs(trlow, tmp_path):
    trace, path = tmp_path / "trace.json", tmp_path / "report.json"
    began = time.monotonic()
    outcome = trlow(*QUICK, "--ranks", 2, "--trace", trace, "--report", path)
    assert time.monotonic() - began < 30  # the measurement bounds itself
    assert (outcome.code, outcome.err) == (0, "")
    said = r"measuring .*\ncommunication adds (-?[\d.]+) µs to a step \((-?[\d.]+)\.\.(-?[\d.]+) "
    found = re.search(said + r"over 5 rounds of (\d+) steps(, within noise)?\)", outcome.out)
    assert found is not None
    middle, low, high = (float(found[place]) for place in (1, 2, 3))
    assert low <= middle <= high
    assert 5 <= int(found[4]) <= 200
    report = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(report["exposed_comm_us"], float)
    assert f"{report['exposed_comm_us']:.1f}" == found[1]
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"DEEP_COMM", "FIRST_BWD", "WEIGHT_UPDATE", "XFER_A", "XFER_B"} <= names


def test_one_rank_has_no_communication_to_measure(trlow, tmp_path):
    outcome = trlow(*QUICK, "--ranks", 1, "--trace", tmp_path / "trace.json")
    assert outcome.code == 0
    assert "communication adds nothing: there is one rank" in outcome.out


def test_a_trace_that_cannot_be_written_keeps_the_report(trlow, tmp_path):
    path = tmp_path / "report.json"
    assert trlow(*QUICK, "--trace", "/dev/full", "--report", path).code == 1
    assert json.loads(path.read_text())["model"] == "mlp"


def test_a_trace_that_cannot_be_written_is_refused_before_training(trlow, tmp_path):
    outcome = trlow(*QUICK, "--trace", tmp_path / "missing" / "trace.json")
    assert outcome.code == 2
    assert "--trace" in outcome.err


@pytest.mark.parametrize(
    ("variable", "loopback_only"), [(None, True), ("", True), ("0", False), ("1", True)]
)
def test_nccl_is_kept_to_loopback_unless_the_user_says_otherwise(
    monkeypatch, variable, loopback_only
):
    monkeypatch.delenv("TRLOW_LOOPBACK_ONLY", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRLOW_LOOPBACK_ONLY", variable)
    arguments = build("0").parse_args(["train"])
    assert settings_of(arguments).loopback_only is loopback_only


@pytest.mark.parametrize(
    ("variables", "graph_mixing"),
    [
        ({}, False),
        ({"TRLOW_GRAPH_MIXING": "1"}, True),
        ({"TRLOW_GRAPH_MIXING": "0"}, False),
        ({"NCCL_GRAPH_MIXING_SUPPORT": "1"}, True),
    ],
)
def test_graph_mixing_is_left_out_unless_the_user_says_otherwise(
    monkeypatch, variables, graph_mixing
):
    for name in ("TRLOW_GRAPH_MIXING", "NCCL_GRAPH_MIXING_SUPPORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings_of(build("0").parse_args(["train"])).graph_mixing is graph_mixing
