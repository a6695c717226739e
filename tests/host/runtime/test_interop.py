"""What others lend to a runtime is used and left alone, and what does not fit is refused."""

from __future__ import annotations

from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

import trlow
from trlow.device import NON_BLOCKING, Platform
from trlow.errors import RankError, UsageError
from trlow.interop import StreamHandle
from trlow.program import Stream

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def platform(settings):
    return Platform.open(settings)


@pytest.fixture
def communicators(platform):
    """Four of them; those that a test says are gone are not destroyed."""
    handles = (c_void_p * 4)()
    platform.nccl.ncclCommInitAll(handles, 4, (c_int * 4)(0, 1, 2, 3))
    made = list(handles)
    yield made
    for handle in made:
        platform.nccl.ncclCommDestroy(handle)


@pytest.fixture
def streams(platform):
    """One of each of four devices."""
    made = []
    for device in range(4):
        handle = c_void_p()
        with platform.on(device):
            platform.cudart.cudaStreamCreateWithFlags(byref(handle), NON_BLOCKING)
        made.append(handle.value)
    yield made
    for handle in made:
        platform.cudart.cudaStreamDestroy(handle)


class Foreign:
    """Another library's stream."""

    def __init__(self, *answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


def mean(runtime, small):
    """Whether a captured mean over ranks is right."""
    replay = runtime.capture(small.mean_program())
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, rank, np.float32))
        arena.copy_in("factor", np.array([0.25], np.float32))
    replay.run(1)
    return all((arena.copy_out("early") == 1.5).all() for arena in runtime.arenas)


# ----------------------------------------------------------------------------- communicators


@pytest.mark.parametrize("arena", ["plain", "window"])
def test_lent_communicators_are_used_and_left_alone(
    settings, small, platform, communicators, arena
):
    live = platform.host.trlowHostLive
    fields = {"arena": arena, "allow_unabortable": True}
    chosen = trlow.Settings(device="host", gpus="0-3", host_devices=4, **fields)
    for _ in range(2):
        with trlow.Runtime(chosen, small.plan, communicators=communicators) as runtime:
            assert live(b"comms") == 4
            assert mean(runtime, small)
        assert live(b"comms") == 4
    code = c_int()
    platform.nccl.ncclCommGetAsyncError(communicators[0], byref(code))
    assert code.value == 0


def test_a_rank_that_fails_costs_lent_communicators_and_that_is_said(
    settings, small, platform, communicators
):
    def fill(rank, step, slot):
        if rank == 1 and step == 2:
            message = "no more data"
            raise OSError(message)

    with trlow.Runtime(settings, small.plan, communicators=communicators) as runtime:
        replay = runtime.capture(small.feed_program())
        with pytest.raises(RankError, match="no more data") as caught:
            replay.run(5, fill)
        assert any("were given to the runtime were aborted" in n for n in caught.value.__notes__)
        assert platform.host.trlowHostLive(b"comms") == 0
        communicators.clear()  # they are gone
        for use in (runtime.capture, runtime.eager):
            with pytest.raises(UsageError, match="aborted after a failure; close this runtime"):
                use(small.mean_program())
        assert runtime.arenas[0].copy_out("early").shape == (1000,)  # results can be saved


def test_a_failure_without_an_abort_costs_nothing(settings, small, communicators):
    with trlow.Runtime(settings, small.plan, communicators=communicators) as runtime:
        with pytest.raises(RankError) as caught:
            runtime.together(lambda rank: 1 // rank.index)
        assert not getattr(caught.value, "__notes__", [])
        assert mean(runtime, small)


def test_communicators_that_do_not_fit_are_refused(settings, small, platform, communicators):
    two, first = (c_void_p * 2)(), communicators
    platform.nccl.ncclCommInitAll(two, 2, (c_int * 2)(0, 1))
    cases = [
        (first[:3], "3 were given for 4 ranks"),
        ([first[1], first[0], *first[2:]], "rank 0 has 1 as its rank"),
        ([first[0]] * 4, "given twice"),
        ([0, *first[1:]], "null"),
        (["a", *first[1:]], "ncclComm_t handles, as ints"),
        ([*two, *first[2:]], "rank 0 has 2 ranks"),
    ]
    try:
        for given, message in cases:
            with pytest.raises(UsageError, match=message):
                trlow.Runtime(settings, small.plan, communicators=given)
        elsewhere = trlow.Settings(device="host", gpus="3,2,1,0", host_devices=4)
        with pytest.raises(UsageError, match="rank 0 has 0 as its device"):
            trlow.Runtime(elsewhere, small.plan, communicators=first)
        alone = trlow.Settings(device="host", gpus="0", host_devices=4)
        with pytest.raises(UsageError, match="a single rank uses none"):
            trlow.Runtime(alone, small.plan, communicators=first[:1])
    finally:
        for handle in two:
            platform.nccl.ncclCommDestroy(handle)


# ----------------------------------------------------------------------------------- streams


def test_lent_streams_are_used_and_left_alone(settings, small, platform, streams):
    given = [streams[0], *(Foreign(0, handle) for handle in streams[1:])]
    seen = {}

    def callback(rank, stream):
        seen[rank] = stream

    stage = trlow.Stage(
        "WORK",
        Stream.COMP_1,
        external=trlow.External("callback", (), (small.plan.range("feature"),), callback),
    )
    program = trlow.Program.single("work", (stage, *small.mean_program().phases[0]))
    before = platform.host.trlowHostLive(b"streams")
    with trlow.Runtime(settings, small.plan, streams={Stream.COMP_1: given}) as runtime:
        assert platform.host.trlowHostLive(b"streams") == before + 16
        runtime.eager(program)
        assert seen == dict(enumerate(streams))
        assert mean(runtime, small)
    for stream in streams:
        platform.cudart.cudaStreamSynchronize(stream)
    assert platform.host.trlowHostLive(b"streams") == before


def test_update_may_be_lent_too(settings, small, streams):
    with trlow.Runtime(settings, small.plan, streams={Stream.UPDATE: streams}) as runtime:
        assert mean(runtime, small)


def test_streams_that_do_not_fit_are_refused(settings, small, platform, streams):
    blocking = c_void_p()
    platform.cudart.cudaStreamCreateWithFlags(byref(blocking), 0)
    rest = streams[1:]
    cases = [
        ([Foreign(0, 1), *rest], "legacy default stream"),
        ([0, *rest], "legacy default stream"),
        ([2, *rest], "per-thread default stream"),
        ([Foreign(1, streams[0]), *rest], "the protocol known here"),
        (["a", *rest], "neither a handle"),
        (rest, "3 were given for 4 ranks"),
        ([streams[1], *rest], "given twice"),
        ([blocking.value, *rest], "orders itself with the legacy"),
        ([streams[1], streams[0], *streams[2:]], "is of device [01], its rank's is [01]"),
    ]
    try:
        for given, message in cases:
            with pytest.raises(UsageError, match=message):
                trlow.Runtime(settings, small.plan, streams={Stream.TRANS: given})
        with pytest.raises(UsageError, match="is not among"):
            trlow.Runtime(settings, small.plan, streams={"TRANS": streams})
    finally:
        platform.cudart.cudaStreamDestroy(blocking)


def test_a_ranks_streams_are_objects_for_others(runtime):
    def protocol(rank):
        view = rank.streams.object(Stream.COMP_2)
        return view.__cuda_stream__() == (0, rank.streams[Stream.COMP_2])

    assert runtime.together(protocol) == [True] * 4
    assert StreamHandle(7).__cuda_stream__() == (0, 7)
