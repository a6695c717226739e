"""Arenas as one symmetric window: the same programs, refusals with their reason, nothing left."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import trlow
from trlow.device import Platform
from trlow.errors import LibraryError, RankError, SettingsError, TrlowError
from trlow.range_op import MEAN_STRATEGIES, mean_all_reduce

pytestmark = pytest.mark.timeout(90)

SETTINGS = trlow.Settings(
    device="host",
    gpus="0-3",
    host_devices=4,
    deadline_s=20.0,
    arena="window",
    allow_unabortable=True,
)
LIVE = (
    *(b"streams", b"events", b"graphs", b"execs", b"allocations", b"pinned", b"comms"),
    *(b"modules", b"windows", b"reductions", b"captures"),
)


def fill(rank, step, slot):
    slot["data"][:] = np.random.default_rng([rank, step]).normal(size=6)


def weights_after(settings, small, mode, steps=5):
    with trlow.Runtime(settings, small.plan) as runtime:
        for arena in runtime.arenas:
            arena.copy_in("one", np.array([1.0], np.float32))
        if mode == "eager":
            runtime.eager(small.feed_program(), steps, fill)
        else:
            runtime.capture(small.feed_program(), mode).run(steps, fill, audit=True)
        return [arena.copy_out("w").tobytes() for arena in runtime.arenas]


@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
def test_window_and_plain_arenas_end_with_the_same_bytes(small, mode):
    window = weights_after(SETTINGS, small, mode)
    assert len(set(window)) == 1
    assert window == weights_after(replace(SETTINGS, arena="plain"), small, mode)


def test_each_arena_is_one_window_of_whole_pages_of_zeros(small):
    host = Platform.open(SETTINGS).host
    live, calls = host.trlowHostLive, host.trlowHostCalls
    before = live(b"windows"), calls(b"ncclCommWindowRegister")
    with trlow.Runtime(SETTINGS, small.plan) as runtime:
        assert live(b"windows") - before[0] == 4
        for arena in runtime.arenas:
            assert arena.base % 4096 == arena.nbytes % 4096 == 0
            assert 0 <= arena.nbytes - small.plan.arena_nbytes < 4096
            assert not arena.copy_out(small.plan.span("W_BUCKET_0", "S_SCALAR_INT")).any()
        runtime.capture(small.feed_program(), "fused").run(2, fill)
        runtime.capture(small.mean_program(), "staged").run(2)
        assert calls(b"ncclCommWindowRegister") - before[1] == 4  # once, whatever is captured
    assert live(b"windows") == before[0]


def test_a_window_is_of_whole_pages_where_its_plan_is_not(small):
    builder = trlow.PlanBuilder(small.plan.table, arena_alignment=256)
    builder.add("G_BUCKET_1", "late", (24,))
    plan = builder.build()
    assert plan.arena_nbytes % 4096
    with trlow.Runtime(SETTINGS, plan) as runtime:
        pages = -(-plan.arena_nbytes // 4096)
        assert [arena.nbytes for arena in runtime.arenas] == [4096 * pages] * 4


@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_every_mean_works_on_windows(small, strategy):
    op = mean_all_reduce(small.early, factor=small.factor, strategy=strategy)
    program = trlow.Program.single("m", (trlow.Stage("MEAN", trlow.Stream.UPDATE, (op,)),))
    with trlow.Runtime(SETTINGS, small.plan) as runtime:
        replay = runtime.capture(program)
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("factor", np.array([0.25], np.float32))
            arena.copy_in("early", np.full(1000, rank, np.float32))
        replay.run(1)
        for arena in runtime.arenas:
            assert (arena.copy_out("early") == (6 if strategy == "deferred" else 1.5)).all()


def test_windows_are_registered_again_after_a_recovery(small):
    host = Platform.open(SETTINGS).host
    before = [host.trlowHostLive(name) for name in LIVE]
    with trlow.Runtime(SETTINGS, small.plan) as runtime:
        replay = runtime.capture(small.feed_program())

        def failing(rank, step, slot):
            if rank == 1 and step == 2:
                message = "no more data"
                raise OSError(message)

        with pytest.raises(RankError, match="no more data"):
            replay.run(9, failing)
        assert host.trlowHostLive(b"windows") == before[LIVE.index(b"windows")]
        again = runtime.capture(small.mean_program())
        assert host.trlowHostLive(b"windows") == before[LIVE.index(b"windows")] + 4
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("factor", np.array([0.25], np.float32))
            arena.copy_in("early", np.full(1000, rank, np.float32))
        again.run(1)
        assert all((arena.copy_out("early") == 1.5).all() for arena in runtime.arenas)
    assert [host.trlowHostLive(name) for name in LIVE] == before


def test_a_window_that_cannot_be_registered_again_says_so_and_the_next_try_works(small):
    with trlow.Runtime(SETTINGS, small.plan) as runtime:
        replay = runtime.capture(small.feed_program())

        def failing(rank, step, slot):
            message = "no data"
            raise OSError(message)

        with pytest.raises(RankError, match="no data"):
            replay.run(9, failing)
        runtime.platform.host.trlowHostFail(b"ncclCommWindowRegister", 3, 2)
        with pytest.raises(TrlowError, match="ncclCommWindowRegister"):
            runtime.capture(small.mean_program())
        runtime.platform.host.trlowHostFail(b"*", 0, 0)
        runtime.capture(small.mean_program()).run(1)


@pytest.mark.parametrize(
    "function",
    [
        *("ncclMemAlloc", "ncclCommWindowRegister", "ncclGroupStart", "ncclGroupEnd"),
        "cudaMemsetAsync",
    ],
)
def test_failing_any_call_leaves_nothing_behind(small, function):
    settings = replace(SETTINGS, gpus="0-1")
    host = Platform.open(settings).host
    before = [host.trlowHostLive(name) for name in LIVE]
    for nth in range(1, 100):
        host.trlowHostFail(function.encode(), nth, 2)
        failure = None
        try:
            with trlow.Runtime(settings, small.plan) as runtime:
                runtime.capture(small.feed_program()).run(2, fill)
        except TrlowError as error:
            failure = str(error)
            assert function in failure
        finally:
            host.trlowHostFail(function.encode(), 0, 0)
        assert [host.trlowHostLive(name) for name in LIVE] == before, (nth, failure)
        if failure is None:
            assert nth > 1
            return
    pytest.fail(f"{function} is called without end")


# What fails to be released lives on: so this runs in a process of its own.
FAILING_RELEASE = """
import trlow
table = trlow.RegionTable("t", (trlow.Region("G", trlow.F32, "gradients"),), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (100,))
runtime = trlow.Runtime(trlow.{settings!r}, builder.build())
runtime.platform.host.trlowHostFail({function!r}.encode(), 1, 2)
try:
    runtime.close()
except trlow.TrlowError as error:
    assert {function!r} in str(error), error
else:
    raise SystemExit("no error")
runtime.close()
"""


@pytest.mark.parametrize("function", ["ncclCommWindowDeregister", "ncclMemFree"])
def test_a_failing_release_is_one_error_and_no_hang(function):
    code = FAILING_RELEASE.format(settings=replace(SETTINGS, gpus="0-1"), function=function)
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_below_2_29_7_it_needs_a_word_for_a_hang_that_no_abort_ends(small):
    with pytest.raises(SettingsError, match=r"2\.28\.9.*below 2\.29\.7.*allow_unabortable"):
        trlow.Runtime(replace(SETTINGS, allow_unabortable=False), small.plan)


@pytest.mark.parametrize(("version", "refused"), [(22906, True), (22907, False), (23004, False)])
def test_from_2_29_7_on_it_needs_none(small, monkeypatch, version, refused):
    platform = Platform.open(SETTINGS)
    monkeypatch.setattr(platform.nccl, "version", version)
    settings = replace(SETTINGS, allow_unabortable=False)
    if refused:
        with pytest.raises(SettingsError, match=r"2\.29\.6"):
            trlow.Runtime(settings, small.plan, platform=platform)
    else:
        trlow.Runtime(settings, small.plan, platform=platform).close()


def test_an_nccl_without_windows_is_too_old(small, monkeypatch):
    platform = Platform.open(SETTINGS)
    monkeypatch.setattr(platform.nccl, "version", 22606)
    with pytest.raises(LibraryError, match=r"needs NCCL >= 2\.27\.0, loaded 2\.26\.6"):
        trlow.Runtime(SETTINGS, small.plan, platform=platform)


def test_an_nccl_that_registers_nothing_without_an_error_is_no_window(small, monkeypatch):
    host = Platform.open(SETTINGS).host
    before = [host.trlowHostLive(name) for name in LIVE]
    platform = Platform.open(SETTINGS)
    monkeypatch.setattr(
        platform.nccl, "ncclCommWindowRegister", lambda *arguments: 0, raising=False
    )
    with pytest.raises(SettingsError, match="registered no window"):
        trlow.Runtime(SETTINGS, small.plan, platform=platform)
    assert [host.trlowHostLive(name) for name in LIVE] == before


def test_one_rank_has_nobody_to_share_a_window_with(small):
    with pytest.raises(SettingsError, match="one rank: there is no communicator"):
        trlow.Runtime(replace(SETTINGS, gpus="0"), small.plan)


def test_an_unknown_arena_is_refused():
    with pytest.raises(SettingsError, match="'symmetric' is unknown; use one of plain, window"):
        trlow.Settings(arena="symmetric")
