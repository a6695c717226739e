"""Every test here gives back what it made on the host device: the next one starts from nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trlow.binding import host

KINDS = ("streams", "events", "graphs", "execs", "allocations", "pinned", "comms", "modules")


@pytest.fixture(scope="session")
def host_live():
    """How many objects of each kind live on the host device."""
    live = host.load().host.trlowHostLive
    return lambda: {kind: live(kind.encode()) for kind in KINDS}


@pytest.fixture(autouse=True)
def nothing_left_behind(host_live) -> Iterator[None]:
    """Fail a test after which more objects live than before it."""
    before = host_live()
    yield
    after = host_live()
    assert all(after[kind] <= before[kind] for kind in KINDS), (before, after)
