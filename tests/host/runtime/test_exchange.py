"""Copies between ranks: on a runtime's own memory, and what the process is left with."""

from __future__ import annotations

import time
from ctypes import byref, c_int
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from exchange_programs import copying, parts

import trlow
from trlow import transport
from trlow.arena import Arena
from trlow.binding.cudart import cudaHostFn_t
from trlow.device import Platform
from trlow.enqueue import Rank
from trlow.errors import CaptureError, RankError
from trlow.exchange import admit, receive, send
from trlow.nodes import is_capturing
from trlow.transport import NO_PEERS, HostTransport, no_link, transport_name

pytestmark = pytest.mark.timeout(60)
LATE_S = 0.3


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in NO_PEERS:
        monkeypatch.delenv(name, raising=False)


def through_host(settings, **fields):
    return replace(settings, transport="host", **fields)


@pytest.fixture
def halved(monkeypatch):
    """Copies through the host in parts of 100 floats."""
    monkeypatch.setattr(transport, "PART_NBYTES", 400)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("way", ["peer", "host"])
@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
def test_every_rank_gets_what_the_rank_before_has(settings, small, mode, way):
    program, values = copying(small), np.arange(1, 1001, dtype=np.float32)
    with trlow.Runtime(replace(settings, transport=way), small.plan) as runtime:
        for arena in runtime.arenas:
            arena.copy_in("one", np.array([1.0], np.float32))
        replay = None if mode == "eager" else runtime.capture(program, mode)
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("early", values * 10.0**rank)
        if replay is None:
            runtime.eager(program, 2)
        else:
            replay.run(2)
        for rank, arena in enumerate(runtime.arenas):
            own, before, further = (10.0 ** ((rank - back) % 4) for back in range(3))
            found = arena.copy_out("early")
            np.testing.assert_allclose(found[500:], values[:500] * (before + further), rtol=1e-6)
            wanted = values[:500] * (own + 2 * before + further)
            np.testing.assert_allclose(found[:500], wanted, rtol=1e-6)


@pytest.mark.usefixtures("halved")
def test_a_copy_through_the_host_is_two_nodes_for_each_part(settings, small):
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        replay = runtime.capture(copying(small), "fused")
        (nodes,) = replay.first_graphs.nodes.values()
        assert nodes.count("memcpy") == 2 * 5  # 500 floats


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("seed", range(1, 6))
def test_through_the_host_any_order_of_work_gives_the_same_bytes(settings, small, seed):
    """A second half ahead of its first, or a rank that meets before it, would change them."""
    shuffled = through_host(settings, gpus="0-1", host_schedule_seed=seed)
    with trlow.Runtime(shuffled, small.plan) as runtime:
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("one", np.array([1.0], np.float32))
            arena.copy_in("early", np.full(1000, rank + 1, np.float32))
        runtime.eager(copying(small), 5)
        replay = runtime.capture(copying(small))
        replay.run(15)
        for arena in runtime.arenas:
            found = arena.copy_out("early")
            assert (found[:500] == 3 * 2.0**19).all()
            assert (found[500:] == 3 * 2.0**18).all()


def test_what_was_not_prepared_is_not_copied(settings, small):
    """Its place in pinned memory would be somebody else's."""
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        runtime.capture(copying(small))

        def copy(rank):
            inbox = small.early.offset + small.early.nbytes // 2
            for offset, nbytes in ((inbox - 4, 8), (inbox + 1996, 8), (0, 4)):
                with pytest.raises(RuntimeError, match="were not prepared"):
                    rank.transport.copy(
                        offset, rank.arena.base, nbytes, rank.streams[trlow.Stream.UPDATE]
                    )

        runtime.together(copy)


def test_memory_is_pinned_once_and_another_program_pins_what_it_adds(settings, small):
    host = Platform.open(settings).host
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        before = host.trlowHostLive(b"pinned")
        for name in ("one", "other"):  # each warms up
            phases = copying(small).phases
            runtime.capture(trlow.Program.single(name, *phases)).run(1)
            assert host.trlowHostLive(b"pinned") == before + 4
        mine, inbox = (small.plan.range(name) for name in ("a.data", "b.data"))
        token, update = small.plan.range("one"), trlow.Stream.UPDATE
        ops = (admit(token, inbox), send(inbox, mine), receive(token, inbox))
        stages = tuple(trlow.Stage(op.kind, update, (op,)) for op in ops)
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("a.data", np.full(6, rank, np.float32))
        runtime.capture(trlow.Program.single("more", stages)).run(1)
        assert host.trlowHostLive(b"pinned") == before + 8
        for rank, arena in enumerate(runtime.arenas):
            assert (arena.copy_out("b.data") == (rank - 1) % 4).all()


def test_the_second_half_is_on_a_stream_of_the_next_device(settings, small):
    def device(rank):
        found = c_int()
        rank.platform.cudart.cudaStreamGetDevice(rank.transport._beyond, byref(found))
        return found.value

    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        runtime.capture(copying(small))
        assert runtime.together(device) == [1, 2, 3, 0]


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("mode", ["eager", "fused", "staged"])
def test_work_of_others_may_send_through_the_host_and_is_complete_ahead_of_the_capture(
    settings, small, monkeypatch, mode
):
    """As trlow.torch sends; what it has begun in the warm-up would write amid what follows."""
    joins, join = [], HostTransport.join

    def joining(self, stream):
        joins.append(is_capturing(self._platform, stream))
        join(self, stream)

    monkeypatch.setattr(HostTransport, "join", joining)
    mine, inbox = parts(small)
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        ranks = runtime.together(lambda rank: rank)

        def body(index, stream):
            rank = ranks[index]
            source = rank.arena.base + mine.offset
            rank.transport.copy(inbox.offset, source, mine.nbytes, stream)

        sending = trlow.External("callback", (mine,), (inbox,), body)
        admitting, _, *others = copying(small).phases[0]
        stage = trlow.Stage("SEND", trlow.Stream.TRANS, (), sending)
        program = trlow.Program.single("others", (admitting, stage, *others))
        replay = None if mode == "eager" else runtime.capture(program, mode)
        if mode != "eager":
            assert joins.count(False) == 4 * 2  # behind the callback, ahead of the meeting
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("one", np.array([1.0], np.float32))
            arena.copy_in("early", np.full(1000, 10.0**rank, np.float32))
        if replay is None:
            runtime.eager(program)
        else:
            replay.run(1)
        for rank, arena in enumerate(runtime.arenas):
            before = 10.0 ** ((rank - 1) % 4)
            assert (arena.copy_out("early")[500:] == before).all()
            assert (arena.copy_out("early")[:500] == before + 10.0**rank).all()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ["peer", "host"])
def test_a_receipt_waits_wherever_it_stands_in_its_group(settings, small, way, first):
    admitting, sending, receiving, adding = copying(small).phases[0]
    other = trlow.range_op.sum_all_reduce(small.late)
    ops = (*receiving.ops, other) if first else (other, *receiving.ops)
    both = replace(receiving, ops=ops)
    assert len(both.groups()) == 1
    program = trlow.Program.single("both", (admitting, sending, both, adding))
    with trlow.Runtime(replace(settings, transport=way), small.plan) as runtime:
        for arena in runtime.arenas:
            arena.copy_in("one", np.array([1.0], np.float32))
        replay = runtime.capture(program)
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("early", np.full(1000, 10.0**rank, np.float32))
            arena.copy_in("late", np.full(24, 10.0**rank, np.float32))
        replay.run(1)
        for rank, arena in enumerate(runtime.arenas):
            assert (arena.copy_out("early")[500:] == 10.0 ** ((rank - 1) % 4)).all()
            assert (arena.copy_out("late") == 1111).all()


def holding(runtime, armed, arrived):
    """A stage that keeps the streams on the next devices busy for a while, if ``armed``."""
    ranks = runtime.together(lambda rank: rank)

    @cudaHostFn_t
    def slow(_):
        time.sleep(LATE_S)
        arrived.append(True)

    def hold(index, _, keep=slow):
        if armed:
            beyond = ranks[index].transport._beyond
            runtime.platform.cudart.cudaLaunchHostFunc(beyond, keep, None)

    return trlow.External("callback", (), (), hold)


def failing(armed):
    def fail(*_):
        if armed:
            message = "between the two"
            raise ValueError(message)

    return trlow.External("callback", (), (), fail)


def between(runtime, small, armed, arrived):
    """The sum by copies, whose copies are late and which fails ahead of the meeting."""
    admitting, sending, *others = copying(small).phases[0]
    hold = trlow.Stage("HOLD", trlow.Stream.TRANS, (), holding(runtime, armed, arrived))
    fail = trlow.Stage("FAIL", trlow.Stream.UPDATE, (), failing(armed))
    return trlow.Program.single("between", (admitting, hold, sending, fail, *others))


def test_what_a_recovered_runtime_is_given_is_not_overwritten_by_a_late_copy(settings, small):
    armed, arrived = [], []
    # Workers that are held leave others free.
    with trlow.Runtime(through_host(settings, gpus="0-1", host_workers=4), small.plan) as runtime:
        program = between(runtime, small, armed, arrived)
        runtime.eager(program)
        armed.append(True)
        with pytest.raises(RankError, match="between the two"):
            runtime.eager(program)
        assert arrived
        armed.clear()
        for arena in runtime.arenas:
            arena.copy_in("early", np.full(1000, 9, np.float32))
        time.sleep(2 * LATE_S)
        for arena in runtime.arenas:
            assert (arena.copy_out("early") == 9).all()


@pytest.mark.parametrize("way", ["peer", "host"])
def test_no_memory_goes_while_a_copy_is_on_its_way(settings, small, monkeypatch, way):
    """What a caller has left on the streams of any rank ends before any arena goes."""
    arrived, freed, close = [], [], Arena.close
    mine, inbox = parts(small)

    @cudaHostFn_t
    def slow(rank):  # the first is None
        time.sleep(LATE_S * (rank or 0.5))
        arrived.append(True)

    def send(rank):
        stream = rank.streams[trlow.Stream.TRANS]
        late = rank.transport._beyond if way == "host" else stream
        rank.platform.cudart.cudaLaunchHostFunc(late, slow, rank.index)
        rank.transport.copy(inbox.offset, rank.arena.base + mine.offset, mine.nbytes, stream)

    def closing(self):
        freed.append(len(arrived))
        close(self)

    monkeypatch.setattr(Arena, "close", closing)
    given = replace(settings, transport=way, gpus="0-1", host_workers=4)
    with trlow.Runtime(given, small.plan) as runtime:
        runtime.capture(copying(small))
        runtime.together(send)
    assert freed == [2, 2]


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_after_a_capture_that_failed_amid_a_copy_the_next_one_works(
    settings, small, monkeypatch, mode
):
    """The stream on the next device is let go with the capture that it had been drawn into."""
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        runtime.capture(copying(small)).run(1)
        memcpy, calls = runtime.platform.cudart.cudaMemcpyAsync, count(1)

        def failing(*arguments):
            if next(calls) == 7:  # of all ranks together, so behind others
                message = "no more copies"
                raise RuntimeError(message)
            return memcpy(*arguments)

        monkeypatch.setattr(runtime.platform.cudart, "cudaMemcpyAsync", failing)
        with pytest.raises(CaptureError, match="no more copies"):
            runtime.capture(copying(small), mode)
        monkeypatch.undo()
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("one", np.array([1.0], np.float32))
            arena.copy_in("early", np.full(1000, 10.0**rank, np.float32))
        runtime.eager(copying(small))
        runtime.capture(copying(small), mode).run(1)
        for rank, arena in enumerate(runtime.arenas):
            own, before, further = (10.0 ** ((rank - back) % 4) for back in range(3))
            assert (arena.copy_out("early")[500:] == before + further).all()
            assert (arena.copy_out("early")[:500] == own + 2 * before + further).all()


def test_a_graph_in_which_nothing_was_sent_waits_for_no_copy_of_another(settings, small):
    """Staged, the meeting's capture cannot wait for what was enqueued outside of it."""
    with trlow.Runtime(through_host(settings), small.plan) as runtime:
        replay = runtime.capture(copying(small), "staged")
        captured = replay.first_graphs.nodes.values()
        assert sorted(nodes.count("memcpy") for nodes in captured) == [0, 0, 0, 2]


def test_one_rank_sends_nothing_and_pins_nothing(settings, small):
    host = Platform.open(settings).host
    with trlow.Runtime(through_host(settings, gpus="0"), small.plan) as runtime:
        before = host.trlowHostLive(b"pinned")
        runtime.capture(copying(small)).run(1)
        assert host.trlowHostLive(b"pinned") == before


class Gpus:
    """What is asked of a platform; ``apart``: one that does not reach the next of them."""

    name = "cuda"

    def __init__(self, apart=None):
        self.apart = apart

    def reaches(self, device, _peer):
        return device != self.apart


def test_copies_go_over_links_where_every_rank_has_one():
    assert transport_name("auto", Gpus(), (0, 1, 2)) == "peer"
    assert transport_name("auto", Gpus(apart=2), (0, 1, 2)) == "host"
    assert "device 2 does not reach the memory of device 0" in no_link(Gpus(apart=2), (0, 1, 2))
    for asked in ("peer", "host"):
        assert transport_name(asked, Gpus(), (0, 1)) == asked
        assert transport_name(asked, Gpus(apart=0), (0, 1)) == asked


def test_one_rank_sends_nothing_whatever_is_forbidden(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert transport_name("auto", Gpus(apart=0), (0,)) == "peer"


@pytest.mark.parametrize(
    ("name", "value", "forbids"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_P2P_DISABLE", "", False),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
        ("NCCL_P2P_LEVEL", "SYS", False),
    ],
)
def test_what_forbids_nccl_to_reach_a_peer_forbids_copies_over_links(
    monkeypatch, settings, name, value, forbids
):
    monkeypatch.setenv(name, value)
    assert transport_name("auto", Gpus(), (0, 1)) == ("host" if forbids else "peer")
    reason = no_link(Gpus(), (0, 1))
    assert (reason is None) is not forbids
    assert not forbids or f"{name}={value} says" in reason
    # On the host device there is nothing to forbid.
    assert transport_name("auto", Platform.open(settings), (0, 1)) == "peer"


def test_peers_that_are_reached_already_leave_no_error_behind(runtime, small):
    """The second time CUDA says so, and would tell the next who asks for the last error."""
    for _ in range(2):
        with trlow.Runtime(runtime.settings, small.plan) as another:
            another.capture(copying(small)).run(1)
            errors = another.together(lambda rank: rank.platform.cudart.cudaGetLastError())
            assert errors == [0] * 4


def test_a_graph_without_its_copy_is_noticed(runtime, small, monkeypatch):
    monkeypatch.setattr(Rank, "copy_to_next", lambda *_: None)
    with pytest.raises(CaptureError, match="0 memcpy nodes, wanted 1"):
        runtime.capture(copying(small))


@pytest.mark.parametrize(("can", "atomic"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_a_peer_is_reached_over_a_link_with_atomics_alone(can, atomic):
    def access(value, _device, _peer):
        value._obj.value = can

    def attribute(value, which, _device, _peer):
        value._obj.value = atomic if which == 3 else 1

    cudart = SimpleNamespace(cudaDeviceCanAccessPeer=access, cudaDeviceGetP2PAttribute=attribute)
    assert Platform.reaches(SimpleNamespace(cudart=cudart), 0, 1) is bool(can and atomic)
