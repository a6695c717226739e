"""Making what one rank owns: streams, arena, events, kernels, pinned slots, beats.

Runs on the rank's own thread, whose device stays current from here on. What was made is closed from
the last to the first, so events and streams outlive nothing that uses them and the arena goes late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trlow.arena import Arena
from trlow.device import Events, Streams
from trlow.enqueue import Rank
from trlow.feed import Feed
from trlow.kernel import Kernels
from trlow.marks import Watch
from trlow.program import Stream
from trlow.transport import transport

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from trlow.device import Platform
    from trlow.interop import Lent
    from trlow.plan import MemoryPlan
    from trlow.ranks import Status


@dataclass(frozen=True, slots=True)
class Opening:
    """What all ranks have in common."""

    platform: Platform
    plan: MemoryPlan
    window: bool  # arenas from NCCL's allocator, to be registered as one symmetric window
    watched: bool  # beats in graphs
    lent: Lent  # streams of others
    transport: str  # of copies to the next rank

    def open(
        self,
        rank: int,
        device: int,
        status: Status,
        call: Callable[[Callable[[], Any]], Any],
        stack: ExitStack,
    ) -> Rank:
        """Make one rank; ``stack`` gets what closes it, also where this raises."""
        platform = self.platform
        platform.cudart.cudaSetDevice(device)
        streams = Streams(platform, Stream, self.lent.of_rank(rank))
        stack.callback(streams.close)
        update = streams[Stream.UPDATE]
        arena = Arena(platform, self.plan, rank, update, call, window=self.window)
        stack.callback(arena.close)
        events, step_events = Events(platform), Events(platform)
        kernels, feed = Kernels(platform, device), Feed(platform, self.plan)
        for owner in (events, step_events, kernels, feed):
            stack.callback(owner.close)
        way = transport(self.transport, platform)
        stack.callback(way.close)
        watch = None
        if self.watched:
            watch = Watch(platform, kernels, update)
            stack.callback(watch.close)
        return Rank(
            rank,
            device,
            platform,
            status,
            streams,
            events,
            step_events,
            kernels,
            feed,
            arena,
            way,
            watch,
        )
