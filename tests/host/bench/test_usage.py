"""What was asked cannot be: one line on stderr, exit code 2, before anything is allocated."""

from __future__ import annotations

import json

import pytest

from trlow.bench import worker
from trlow.bench.job import Job
from trlow.bench.process import WorkerProcess

HOST = ("--device", "host")


@pytest.fixture
def nothing_started(monkeypatch):
    """A worker would be too late for an error that needs no device."""

    def refuse(*_arguments):
        raise AssertionError("a worker was started before the request was checked")

    monkeypatch.setattr(WorkerProcess, "__init__", refuse)


def check_refused(outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["WHAT"]),
        (["all_to_all"], ["all_to_all", "all_reduce"]),
        (["all_reduce", "-b", "6", "-e", "6"], ["size 6", "4 bytes", "use 4 or 8"]),
        (["all_reduce", "-b", "64", "-e", "8"], ["-b 64", "larger than -e 8"]),
        (["all_reduce", "-b", "0"], ['"0"', "no size"]),
        (["all_reduce", "-b", "many"], ['"many"', "512M"]),
        (["all_reduce", "-b", "-8"], ["-b"]),
        (["all_reduce", "-b", "8", "-e", "8G", "-i", "8"], ["more than 4096 sizes"]),
        (["all_reduce", "-f", "1"], ["-f", "at least 2"]),
        (["all_reduce", "-f", "2", "-i", "8"], ["-i", "not allowed with"]),
        (["all_reduce", "-d", "int128"], ['"int128"', "float8_e4m3"]),
        (["all_reduce", "-o", "xor"], ["xor", "mulsum"]),
        (["all_reduce", "-o", "avg", "-d", "int32"], ["int32", "truncates", "-o sum"]),
        (["broadcast", "-r", "-1"], ["-r", "at least 0"]),
        (["broadcast", "-o", "sum"], ["-o"]),
        (["sendrecv", "--in-place"], ["no in-place form"]),
        (["all_reduce", "--in-place", "--both"], ["not allowed with"]),
        (["all_reduce", "--algo", "Ring,Star"], ["--algo", '"Star"', "NVLSTree"]),
        (["all_reduce", "--algo", "ring,Ring"], ["Ring twice"]),
        (["all_reduce", "--proto", "LL64"], ["LL64", "LL128"]),
        (["all_reduce", "--buffers", "pinned"], ["pinned", "window"]),
        (["all_reduce", "--launch", "one"], ["one", "group"]),
        (["all_reduce", "--ctas", "0"], ["--ctas", "1 to 64"]),
        (["all_reduce", "--ctas", "8-4"], ["8-4", "backwards"]),
        (["all_reduce", "--mixing", "maybe", "-G", "1"], ["maybe", "on, off"]),
        (["all_reduce", "--mixing", "on"], ["-G"]),
        (["all_reduce", "--mean", "avg", "-d", "int32"], ["--mean", "float32"]),
        (["all_reduce", "--mean", "avg", "-o", "max"], ["replaces -o"]),
        (["all_reduce", "-n", "0"], ["-n", "at least 1"]),
        (["all_reduce", "--gpus", "0-"], ["0-"]),
        (["all_reduce", "--deadline", "0"], ["--deadline", "above 0"]),
        (["all_reduce", "--json", "/nowhere/x.json"], ["--json", "cannot be written"]),
        (["all_reduce", "--csv", "/"], ["--csv", "is a folder"]),
        (["all_reduce", "--plot", "picture.bmp"], [".svg or .png"]),
        (["plan", "--data", "words"], ["words"]),
        (["plan", "--json", "/nowhere/x.json"], ["--json", "cannot be written"]),
        (["compare", "a.json", "b.json"], ["a.json", "cannot be read"]),
        (["compare", "a.json", "b.json", "--fail-above", "-1"], ["--fail-above"]),
    ],
)  # fmt: skip
def test_what_no_machine_can_do_is_refused_before_a_worker_starts(
    bench, nothing_started, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    extra = HOST if arguments[:1] in (["all_reduce"], ["plan"]) else ()
    check_refused(bench(*arguments, *extra), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_reduce", "--gpus", "0-7"], ["0-7", "beyond this machine, which has 4"]),
        (["all_gather", "-b", "8", "-e", "8"], ["size 8", "4 ranks x 4 bytes", "use 16"]),
        (["reduce", "-b", "8", "-e", "8", "-r", "4"], ["-r 4", "0 to 3"]),
        (["all_reduce", "-b", "1024G", "-e", "1024G"], ["free", "smaller -e"]),
        (["all_reduce", "-b", "8", "-e", "8", "-o", "avg", "--gpus", "0-2"], ["1/3", "-c 0"]),
        (["plan", "--gpus", "0"], ["one rank communicates nothing"]),
        (["plan", "--gpus", "0-2"], ["128", "3"]),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_is_allocated(
    bench, tmp_path, arguments, words
):
    outcome = bench(*arguments, *HOST)
    check_refused(outcome, *words)


def test_a_dtype_that_the_library_lacks_names_the_version_that_has_it(monkeypatch):
    job = Job(collective="all_reduce", dtype="float8_e4m3", most=64, settings={"device": "host"})
    opened = worker.Platform.open

    def old(settings):
        platform = opened(settings)
        platform.nccl.version = 22303
        return platform

    monkeypatch.setattr(worker.Platform, "open", old)
    answers = []
    requests = iter([json.dumps({"do": "hello"}), json.dumps({"do": "open"})])
    worker.serve(worker.Server(job), requests, answers.append)
    (answer,) = map(json.loads, answers)  # the first that fails is the last
    assert (answer["ok"], answer["usage"]) == (False, True)
    assert "float8_e4m3 needs NCCL >= 2.24.0, loaded 2.23.3 from" in answer["error"]
