"""Streams that torch has seen, which live as long as the process.

Autograd's nodes remember the stream of their forward. The node that adds a parameter's gradient
lives as long as anything of any graph of that parameter does: an output that a module keeps, the
frames of an exception. The next backward finds it, and waits for its stream. Were that destroyed
the process would die there. So streams go back to a stock of their device, and the next owner takes
them from it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from trlow.device import Streams
from trlow.program import Stream
from trlow.torch.inputs import stream_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.device import Platform
    from trlow.torch.member import Member

_stock: defaultdict[int, list[Streams]] = defaultdict(list)  # by device


class Loan:
    """A set of streams for each rank, of which nobody else knows until they are given back."""

    def __init__(self, platform: Platform, members: Sequence[Member]) -> None:
        """Take what is in stock, and make the rest; on GPUs. Raises ``CudaError``."""
        self._taken: list[tuple[int, Streams]] = []
        try:
            for member in members:
                if member.device.type == "cuda":
                    streams = self._take(platform, member.device.index)
                    member.side = stream_of(streams[Stream.COMP_1], member.device)
        except BaseException:
            self.give_back()
            raise

    def _take(self, platform: Platform, device: int) -> Streams:
        try:
            streams = _stock[device].pop()  # one step: others may take at the same time
        except IndexError:
            with platform.on(device):
                streams = Streams(platform, tuple(Stream))
        self._taken.append((device, streams))
        return streams

    @property
    def streams(self) -> dict[Stream, list[int]]:
        """One for each rank, by what it is for; nothing on the host device."""
        if not self._taken:
            return {}
        return {key: [streams[key] for _, streams in self._taken] for key in Stream}

    def give_back(self) -> None:
        """Nothing runs on them any more. A second call does nothing."""
        while self._taken:
            device, streams = self._taken.pop()
            _stock[device].append(streams)
