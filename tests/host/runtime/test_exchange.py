"""Copies between ranks: on a runtime's own memory, and what the process is left with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from exchange_programs import copying

import trlow
from trlow.device import Platform
from trlow.enqueue import Rank
from trlow.errors import CaptureError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_every_rank_gets_what_the_rank_before_has(runtime, small, mode):
    replay = runtime.capture(copying(small), mode)
    for rank, arena in enumerate(runtime.arenas):
        arena.copy_in("early", np.full(1000, 10.0**rank, np.float32))
    replay.run(1)
    for rank, arena in enumerate(runtime.arenas):
        before = 10.0 ** ((rank - 1) % 4)
        assert (arena.copy_out("early")[500:] == before).all()
        assert (arena.copy_out("early")[:500] == before + 10.0**rank).all()


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
