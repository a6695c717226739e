"""Every rank computes on threads of the host device, so torch itself gets one thread each."""

from __future__ import annotations

import pytest


@pytest.fixture
def device():
    """What tests that also run on GPUs ask for."""
    return "host"


@pytest.fixture(autouse=True)
def one_thread():
    torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
