"""What was asked cannot be: one line on stderr, exit code 2, nothing opened or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from trlow.binding import clib
from trlow.device import Platform


@pytest.fixture
def no_device(monkeypatch):
    """Opening a platform would be too late for an error of use."""

    def refuse(*_arguments, **_keywords):
        raise AssertionError("a device was opened before the request was checked")

    monkeypatch.setattr(Platform, "open", refuse)


def check_refused(outcome, *words: str) -> None:
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["fly"], ["fly", "train"]),
        (["train", "--gpus", "0-"], ["0-"]),
        (["train", "--gpus", "3-1"], ["3-1", "1-3"]),
        (["train", "--gpus", "0,0"], ["twice"]),
        (["train", "--gpus=-1"], ["-1"]),
        (["train", "--gpus", "-1"], ["-1"]),
        (["train", "--gpus", "a"], ["'a'"]),
        (["train", "--gpus", ""], ["''"]),
        (["train", "--gpus", "0-3", "--ranks", "2"], ["0-3", "--ranks 2", "give one of them"]),
        (["train", "--ranks", "0"], ["--ranks", '"0"', "at least 1"]),
        (["train", "--ranks", "-4"], ["--ranks", '"-4"', "at least 1"]),
        (["train", "--ranks", "two"], ["--ranks", '"two"']),
        (["train", "--global-batch-size", "0"], ["--global-batch-size", '"0"', "at least 1"]),
        (["train", "--global-batch-size", "-8"], ["--global-batch-size", '"-8"']),
        (["train", "--global-batch-size", "1.5"], ["--global-batch-size", '"1.5"']),
        (["train", "--global-batch-size", "1438"], ["1438", "1437", "1436 on 4 ranks"]),
        (["train", "--ranks", "4", "--global-batch-size", "1440"], ["use at most 1436 on 4 ranks"]),
        (["train", "--deadline", "nan"], ["--deadline", '"nan" is no time', "above 0"]),
        (["train", "--deadline", "0"], ["--deadline", '"0" is no time', "above 0"]),
        (["train", "--report", ""], ["--report is empty"]),
        (["train", "--trace", ""], ["--trace is empty"]),
        (["plan", "--svg", ""], ["--svg is empty"]),
        (["train", "--epochs", "0"], ["--epochs", "at least 1"]),
        (["train", "--epochs", "-1"], ["--epochs", "at least 1"]),
        (["train", "--lr", "nan"], ["--lr", '"nan"', "finite"]),
        (["train", "--lr", "inf"], ["--lr", '"inf"', "finite"]),
        (["train", "--lr", "-0.1"], ["--lr", '"-0.1"', "at least 0"]),
        (["train", "--lr", "fast"], ["--lr", '"fast"']),
        (["train", "--seed", "-1"], ["--seed", "at least 0"]),
        (["train", "--seed", str(2**64)], ["seed", str(2**64)]),
        (["train", "--model", "rnn"], ["rnn", "cnn", "mlp"]),
        (["train", "--optimizer", "adam"], ["adam", "nesterov"]),
        (["train", "--schedule", "linear"], ["linear", "cosine"]),
        (["train", "--replay", "fast"], ["fast", "staged"]),
        (["train", "--mean-strategy", "ring"], ["ring", "deferred", "premulsum"]),
        (["train", "--arena", "huge"], ["huge", "plain", "window"]),
        (["train", "--device", "tpu"], ["tpu", "host"]),
        (["train", "--data", "mnist"], ["mnist", "idx:DIR"]),
        (["train", "--data", "idx:/no/such/folder"], ["/no/such/folder"]),
        (["train", "--epoch", "3"], ["--epoch"]),
        (["plan", "--ranks", "3"], ["3", "power of two"]),
        (["plan", "--ranks", "4", "--global-batch-size", "130"], ["130", "4", "128", "132"]),
        (["plan", "--svg", "/no/such/folder/a.svg"], ["/no/such/folder/a.svg"]),
        (["doctor", "--loud"], ["--loud"]),
    ],
)
def test_a_bad_word_or_number_is_refused_in_one_line(trlow, no_device, arguments, words):
    check_refused(trlow(*arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "3"], ["3 ranks", "power of two"]),
        (["--gpus", "0-2"], ["3 ranks", "power of two", "--any-world-size"]),
        (["--gpus", "2-9"], ["9", "beyond", "0 to 3", "TRLOW_HOST_DEVICES=10", "--ranks 10"]),
        (["--ranks", "4", "--global-batch-size", "130"], ["130", "4", "128", "132"]),
        (["--ranks", "2", "--arena", "window"], ["2.28.9", "below 2.29.7", "--allow-unabortable"]),
        (["--ranks", "1", "--arena", "window", "--allow-unabortable"], ["one rank", "plain"]),
    ],
)
def test_what_depends_on_the_machine_is_refused_before_anything_is_allocated(
    trlow, arguments, words
):
    with clib.counting() as calls:
        outcome = trlow("train", "--device", "host", *arguments)
    check_refused(outcome, *words)
    names = {name for _, name in calls}
    assert names.isdisjoint({"cudaMalloc", "cudaHostAlloc", "cudaStreamCreateWithFlags"})


def test_a_report_into_a_missing_folder_is_refused_before_training(trlow, no_device, tmp_path):
    path = tmp_path / "missing" / "report.json"
    check_refused(trlow("train", "--report", path), str(path), "folder that exists")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_report(trlow, no_device, tmp_path):
    check_refused(trlow("train", "--report", tmp_path), str(tmp_path), "is a folder")


def test_a_report_below_a_file_is_refused(trlow, no_device, tmp_path):
    (tmp_path / "file").write_text("kept")
    check_refused(trlow("train", "--report", tmp_path / "file" / "report.json"), "--report")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_that_takes_no_files_takes_no_report(trlow, no_device):
    # /proc refuses new files even to root.
    check_refused(trlow("train", "--report", "/proc/report.json"), "/proc/report.json")


def test_checking_the_report_changes_no_file(trlow, no_device, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    check_refused(trlow("train", "--report", path, "--data", "nothing"), "nothing")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_broken_data_is_refused_with_the_file(trlow, no_device, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01")
    outcome = trlow("train", "--data", f"idx:{tmp_path}")
    check_refused(outcome, "train-images-idx3-ubyte", "truncated")


def test_a_variable_with_a_bad_value_is_refused_with_its_name(trlow, no_device, monkeypatch):
    monkeypatch.setenv("TRLOW_DEADLINE_S", "soon")
    check_refused(trlow("train"), "TRLOW_DEADLINE_S", "soon")


@pytest.mark.parametrize("command", ["train", "plan", "bench plan", "bench all_reduce"])
def test_a_variable_that_nothing_reads_is_refused_with_the_known_ones(
    trlow, no_device, monkeypatch, command
):
    monkeypatch.setenv("TRLOW_SEDE", "1")
    check_refused(trlow(*command.split()), "TRLOW_SEDE", "TRLOW_SEED")


def test_a_report_and_a_trace_in_one_file_are_refused(trlow, no_device, tmp_path):
    path, same = tmp_path / "same.json", tmp_path / "." / "link.json"
    same.symlink_to(path)
    check_refused(trlow("train", "--report", path, "--trace", same), "--report and --trace")
    assert not path.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "--model", "mlp", "--epochs", "1", "--device", "host"), "--report"),
        (("train", "--model", "mlp", "--epochs", "1", "--device", "host"), "--trace"),
        (("plan",), "--svg"),
    ],
)
def test_a_full_disk_is_one_line_and_exit_code_1(trlow, words, option):
    outcome = trlow(*words, option, "/dev/full")
    assert outcome.code == 1
    assert outcome.err == f"trlow: error: {option} /dev/full: No space left on device\n"


def test_as_a_process_it_is_the_same(process):
    check_refused(process("train", "--lr", "nan"), "--lr")
    check_refused(process("train", "--gpus", "3-1"), "3-1")


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_help_names_every_option_with_its_default(trlow, command):
    outcome = trlow(command, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "exit codes" in outcome.out
    if command == "train":
        for option in [
            "--device",
            "--gpus",
            "--ranks",
            "--data",
            "--model",
            "--global-batch-size",
            "--epochs",
            "--lr",
            "--schedule",
            "--optimizer",
            "--seed",
            "--replay",
            "--any-world-size",
            "--mean-strategy",
            "--arena",
            "--allow-unabortable",
            "--report",
        ]:
            assert option in outcome.out
        assert outcome.out.count("default") >= 12


def test_help_and_version_of_the_whole(trlow):
    outcome = trlow("--help")
    assert outcome.code == 0
    assert all(word in outcome.out for word in ("train", "plan", "doctor"))
    assert trlow("--version").out.startswith("trlow ")


def test_a_reader_that_goes_away_is_no_traceback(process, tmp_path):
    import subprocess
    import sys

    shell = f"{sys.executable} -m trlow plan --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    assert done.stdout == "{"
    assert done.stderr == ""
