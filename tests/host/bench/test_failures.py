"""A worker that hangs, dies, refuses or is wrong: what was measured is kept, exit code 1."""

from __future__ import annotations

import ctypes
import json
import sys
import time

import pytest

from trlow.bench import checking, timing
from trlow.bench.crew import Crew
from trlow.bench.job import Job
from trlow.bench.process import WorkerError, WorkerProcess, start
from trlow.bench.request import Request
from trlow.bench.seat import HOST_TO_DEVICE
from trlow.bench.sweep import Sweep
from trlow.bench.variant import Variant
from trlow.device import Platform
from trlow.errors import NcclError
from trlow.settings import Settings

HOST = {"device": "host", "gpus": "0-1"}
# Answers like a worker up to the request where {what} happens.
STUB = """
import json, sys, time
hello = dict(ranks=2, devices=[0, 1], platform="host", names=["x", "x"], buses=["", ""],
             peer_access=True, libraries={{}}, nccl_version=22809)
for line in sys.stdin:
    do = json.loads(line)
    if do["do"] == "measure" and do["size"] >= 1024:
        {what}
    found = hello if do["do"] == "hello" else dict(time_us=1.0, unit_us=[1.0], enqueue_us=1.0)
    print(json.dumps(dict(found, ok=True, wrong=0, named=[])), flush=True)
"""


def stub(what: str):
    """Starts workers; that of the variant with a limit of CTAs is a stub."""

    def begin(job: Job, variables) -> WorkerProcess:
        if job.variant.ctas is None:
            return start(job, variables)
        return WorkerProcess([sys.executable, "-c", STUB.format(what=what)])

    return begin


@pytest.mark.parametrize(
    ("what", "reason", "failed"),
    [
        ("time.sleep(100)", "no answer to 'measure 1024 in-place' within 1.5 s: hung", True),
        ("sys.exit('out of cheese')", "ended with 1 at 'measure 1024 in-place': out of ch", True),
        (
            "print(json.dumps(dict(ok=False, usage=False, error='no such algorithm')), flush=True)",
            "no such algorithm",
            False,
        ),
    ],
)
def test_one_variant_goes_out_and_the_other_goes_on(what, reason, failed):
    request = Request(
        collective="all_reduce",
        sizes=(256, 1024, 4096),
        iterations=2,
        rounds=2,
        variants=(Variant(), Variant(ctas=(1, 1))),
        deadline_s=1.5,
        settings=HOST,
    )
    kept = []
    run = Sweep(
        request, keep=lambda found: kept.append(len(found.measured)), start_worker=stub(what)
    )
    begun = time.monotonic()
    found = run.run()
    assert time.monotonic() - begun < 20
    assert (found.failed, found.complete) == (failed, not failed)
    assert kept == [2, 3, 4]
    rows = {(row.variant, row.size): row for row in found.rows}
    assert all(rows["default", size].measured for size in request.sizes)
    assert rows["ctas=1", 256].measured
    for size in (1024, 4096):
        assert not rows["ctas=1", size].measured
        assert reason in rows["ctas=1", size].reason
    assert any(note.startswith("ctas=1: ") and reason in note for note in found.notes)


def test_a_hang_is_exit_code_1_with_the_rows_before_it(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("trlow.cli.bench.Sweep", lambda request, **rest: Sweep(
        request, start_worker=stub("time.sleep(100)"), **rest
    ))  # fmt: skip
    path = tmp_path / "found.json"
    outcome = bench(
        "all_reduce", "--device", "host", "--gpus", "0-1", "-b", 256, "-e", 1024, "-f", 4,
        "--ctas", 1, "--deadline", 1, "--json", path,
    )  # fmt: skip
    # the probe is a real worker, the only variant is a stub that hangs at 1024
    assert outcome.code == 1
    assert "CUT SHORT" in outcome.out
    assert "hung" in outcome.out
    rows = json.loads(path.read_text())["rows"]
    assert [bool(row["rounds_us"]) for row in rows] == [True, False]


def test_a_worker_ends_with_the_command_that_started_it():
    worker = start(Job(collective="all_reduce", dtype="float32", most=64, settings=HOST), {})
    worker.ask(30, "hello")
    worker.send("open")
    worker._process.stdin.close()
    assert worker._process.wait(10) == 0
    worker._process.stdin = None
    worker.kill()
    with pytest.raises(WorkerError, match="ended with 0"):
        worker.send("measure", size=64, place="in-place")


@pytest.fixture
def two_ranks():
    """A crew in this process, so that its buffers can be tampered with."""
    made = []

    def call(**values) -> Crew:
        job = Job(collective="all_reduce", dtype="int32", most=1 << 16, **values)
        platform = Platform.open(Settings(device="host", host_devices=4))
        made.append(Crew(platform, job, (0, 1), 20.0))
        return made[-1]

    yield call
    for crew in made:
        crew.close()


def poke(seat, address: int, value: int, bits: int = 32) -> None:
    raw = getattr(ctypes, f"c_uint{bits}")(value)
    seat.copy(address, ctypes.addressof(raw), bits // 8, HOST_TO_DEVICE)
    seat.synchronize()


@pytest.mark.parametrize("launches", [0, 1])
def test_a_wrong_element_is_told_with_rank_index_expected_and_got(two_ranks, monkeypatch, launches):
    crew = two_ranks(launches=launches)
    assert checking.check(crew, 1 << 12, "in-place") == (0, [])
    call = checking.call_once

    def spoilt(crew, nbytes, place):
        call(crew, nbytes, place)
        crew.on_ranks(lambda seat: poke(seat, seat.data("recv") + 4 * (700 + seat.rank), 123456))

    monkeypatch.setattr(checking, "call_once", spoilt)
    total, named = checking.check(crew, 1 << 12, "in-place")
    assert total == 2
    assert [(one.rank, one.index, one.got) for one in named] == [(0, 700, 123456), (1, 701, 123456)]
    assert named[0].expected != 123456
    assert "rank 0, index 700: expected " in str(named[0])


@pytest.mark.parametrize(
    ("place", "name", "offset"),
    [("in-place", "recv", -1), ("in-place", "recv", 1 << 12), ("out-of-place", "send", 1 << 12)],
)
def test_a_byte_beside_the_buffer_is_seen(two_ranks, monkeypatch, place, name, offset):
    crew = two_ranks(places=("in-place", "out-of-place"))
    call = checking.call_once

    def spoilt(crew, nbytes, where):
        call(crew, nbytes, where)
        seat = crew.seats[1]
        crew.on_ranks(lambda one: one is seat and poke(one, one.data(name) + offset, 7, bits=8))

    monkeypatch.setattr(checking, "call_once", spoilt)
    total, (wrong,) = checking.check(crew, 1 << 12, place)
    assert total == 1
    assert (wrong.rank, wrong.index, wrong.got) == (1, offset, "0x7")
    assert "guard" in str(wrong)


def test_a_wrong_element_is_exit_code_1(bench, monkeypatch):
    what = STUB.replace("wrong=0, named=[]", "wrong=2, named=['rank 0, index 5: …']")
    monkeypatch.setattr("trlow.cli.bench.Sweep", lambda request, **rest: Sweep(
        request,
        start_worker=lambda job, variables: WorkerProcess(
            [sys.executable, "-c", what.format(what="pass")]
        ),
        **rest,
    ))  # fmt: skip
    outcome = bench("all_reduce", "--device", "host", "-b", 64, "-e", 64)
    assert outcome.code == 1
    assert "WRONG at 64 default in-place: 2 elements; rank 0, index 5" in outcome.out


@pytest.mark.parametrize("launch", ["group", "threads"])
@pytest.mark.parametrize("launches", [0, 1])
def test_a_call_that_is_refused_on_one_rank_ends_all_with_its_error(two_ranks, launch, launches):
    crew = two_ranks(variant=Variant(launch=launch), launches=launches)
    checking.check(crew, 64, "in-place")
    crew.links.reductions[1] = 999
    begun = time.monotonic()
    with pytest.raises(NcclError, match="reduction 999 does not exist"):
        timing.measure(crew, 128, "in-place")
    assert time.monotonic() - begun < 10
    crew.links.reductions[1] = 0
