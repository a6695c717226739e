"""`trlow bench` on the host device: what it measures, checks, shows and writes."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time

import pytest

from trlow.bench.collectives import COLLECTIVES
from trlow.bench.in_context import with_load
from trlow.nn import Variant, compile_model
from trlow.nn.models import MODELS

QUICK = ("--device", "host", "--rounds", 2, "-n", 4, "-w", 1)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("launches", [0, 2])
def test_every_collective_is_timed_and_exact(measured, name, launches):
    place = "--out-of-place" if name == "sendrecv" else "--both"
    found = measured(
        name, "-b", 64, "-e", "4K", "-f", 64, "-G", launches, "--launch", "threads,group", place
    )
    assert found["complete"]
    places = 1 if name == "sendrecv" else 2
    assert len(found["rows"]) == 2 * 2 * places
    for row in found["rows"]:
        assert (row["wrong"], row["named"], row["reason"]) == (0, [], None)
        assert len(row["rounds_us"]) == 1
        assert len(row["unit_us"]) == (launches or 3)
        assert row["time_us"] > 0
        assert row["algbw_gbps"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        factor = COLLECTIVES[name].factor(2)
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * factor)
        assert row["traffic_nbytes"] == row["size"] * factor
        assert row["least_us"] <= row["p5_us"] <= row["median_us"] <= row["p95_us"] <= row["p99_us"]


def test_one_device_and_three_work(measured):
    for gpus, ranks in (("0", 1), ("0-2", 3)):
        found = measured("all_reduce", "-b", 24, "-e", 24, "--gpus", gpus, "-G", 1)
        (row,) = found["rows"]
        assert (row["ranks"], row["wrong"]) == (ranks, 0)
        assert row["traffic_nbytes"] == 24 * 2 * (ranks - 1) / ranks


def test_variants_are_measured_in_turn_and_shown_side_by_side(bench, tmp_path):
    path, sheet = tmp_path / "found.json", tmp_path / "found.csv"
    outcome = bench(
        "all_reduce", *QUICK, "-b", "1K", "-e", "4K", "-f", 2, "-G", 2, "--gpus", "0-1",
        "--buffers", "plain,registered", "--ctas", "2,1-4", "--mixing", "off", "--json", path,
        "--csv", sheet,
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    rows = json.loads(path.read_text())["rows"]
    names = [
        f"{kind}ctas={ctas} mixing=off" for kind in ("", "registered ") for ctas in ("2", "1-4")
    ]
    assert [row["variant"] for row in rows] == names * 3
    assert all(row["wrong"] == 0 for row in rows)
    assert "fastest in-place" in outcome.out
    lines = list(csv.DictReader(sheet.read_text().splitlines()))
    assert [line["variant"] for line in lines] == names * 3
    assert float(lines[0]["time_us"]) == pytest.approx(rows[0]["time_us"])


def test_symmetric_windows_have_to_be_allowed_on_an_old_nccl(bench, measured):
    outcome = bench("all_reduce", *QUICK, "-b", 64, "-e", 64, "--buffers", "window")
    assert outcome.code == 2
    assert "below 2.29.7" in outcome.err
    found = measured(
        "all_reduce", "-b", 64, "-e", 64, "-G", 1, "--buffers", "window", "--allow-unabortable"
    )
    assert [row["wrong"] for row in found["rows"]] == [0]


def test_the_mean_strategies_of_trlow_are_exact(measured):
    strategies = "deferred,sum_then_scale,avg,premulsum"
    found = measured(
        "all_reduce", "-b", 64, "-e", "64K", "-f", 1024, "-G", 1, "--mean", strategies, "--both",
        "-d", "half", "--launch", "threads,group",
    )  # fmt: skip
    assert len(found["rows"]) == 4 * 2 * 2 * 2
    assert {row["wrong"] for row in found["rows"]} == {0}


def test_the_head_names_machine_libraries_and_variables(measured, monkeypatch):
    monkeypatch.setenv("NCCL_BUFFSIZE", "4194304")
    found = measured("all_reduce", "-b", 64, "-e", 64)
    header = found["header"]
    assert header["ranks"] == 2
    assert header["libraries"]["nccl"]["path"].endswith("libtrlow_host.so")
    assert header["variables"]["NCCL_BUFFSIZE"] == "4194304"
    assert header["trlow"]
    assert found["request"]["collective"] == "all_reduce"


def test_a_pair_that_cannot_be_is_not_available_with_its_reason(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    path = tmp_path / "found.json"
    outcome = bench(
        "all_reduce", *QUICK, "-b", 64, "-e", 64, "--algo", "Ring,NVLS,PAT", "--proto",
        "LL,Simple", "--json", path,
    )  # fmt: skip
    assert outcome.code == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["Ring/LL"]["rounds_us"]
    assert "NCCL_NVLS_ENABLE=0" in rows["NVLS/Simple"]["reason"]
    assert "NCCL has no PAT all_reduce" in rows["PAT/LL"]["reason"]
    assert "not available" in outcome.out


def test_a_picture_is_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "found.svg"
    outcome = bench("all_reduce", *QUICK, "-b", 64, "-e", 64, "--plot", path)
    assert (outcome.code, outcome.err) == (0, "")
    assert path.read_bytes().startswith(b"<?xml")


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    path = tmp_path / "found.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "trlow", "bench", "all_reduce", "--device", "host", "--json",
         str(path), "-b", "8", "-e", "128K", "-i", "32", "-n", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 60
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "trlow: error: interrupted\n")
    assert "CUT SHORT" in out
    found = json.loads(path.read_text())
    assert not found["complete"]
    assert found["rows"][0]["rounds_us"]


def test_a_plans_own_communication_alone_and_beside_a_backward(bench, tmp_path):
    path = tmp_path / "plan.json"
    outcome = bench(
        "plan", "--device", "host", "--gpus", "0-1", "--steps", 4, "--rounds", 1, "--json", path
    )
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(path.read_text())
    assert found["complete"]
    assert [(one["stage"], one["nbytes"]) for one in found["stages"]] == [
        ("DEEP_COMM", 92172), ("FIRST_COMM", 4928), ("STATS_COMM", 1536), ("VAL_RESULT_COMM", 260),
    ]  # fmt: skip
    for one in found["stages"]:
        times = ("alone_us", "context_us", "backward_us", "backward_beside_us", "slow_down")
        assert all(one[name] > 0 for name in times)
        assert one["exposed_us"] >= 0
    assert found["compute_us"] > found["comm_us"] > 0
    assert "ratio" in outcome.out


def test_memory_for_the_synthetic_backward_moves_nothing():
    compiled = compile_model(
        MODELS["cnn"](10), input_shape=(8, 8, 1), local_batch=32, world_size=4,
        variants=(Variant("short", 5, 8, 8),),
    )  # fmt: skip
    loaded = with_load(compiled.plan, (64, 64, 64))
    for tensor in compiled.plan.tensors:
        assert loaded[tensor.name].offset == tensor.offset
        assert loaded[tensor.name].slot_nbytes == tensor.slot_nbytes
    assert loaded.range("bench.dx").offset >= compiled.plan.tensors[-1].offset


def test_compare_says_what_is_slower_and_fails_above_a_limit(bench, measured, tmp_path):
    found = measured("all_reduce", "-b", 64, "-e", 256, "-f", 4, "-c", 0)
    for row in found["rows"]:
        row["rounds_us"] = [10.0, 10.1, 9.9]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(found))
    for row in found["rows"]:
        row["rounds_us"] = [time_us * 1.2 for time_us in row["rounds_us"]]
    second.write_text(json.dumps(found))
    assert bench("compare", first, second).code == 0
    outcome = bench("compare", first, second, "--fail-above", 10)
    assert outcome.code == 1
    assert outcome.out.count("B slower") == 2
    assert "2 of 2 are slower by more than 10 %" in outcome.out
    assert bench("compare", first, second, "--fail-above", 30).code == 0
    assert bench("compare", second, first, "--fail-above", 10).code == 0
