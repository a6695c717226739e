"""Where the host finds what a step has left on the device: pinned memory for the newest steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.device import Pinned
from trlow.program import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trlow.enqueue import Rank
    from trlow.launching import Call
    from trlow.plan import Range

RESULTS = 64  # steps whose results are kept where the device can write them
DEVICE_TO_HOST = 2  # cudaMemcpyKind
LINE_NBYTES = 64


class Ring:
    """Slots for the results of one rank, taken in turn. Made on that rank's own thread."""

    def __init__(self, rank: Rank, result: Range) -> None:
        nbytes = -(-result.nbytes // LINE_NBYTES) * LINE_NBYTES
        self._pinned = Pinned(rank.platform, RESULTS * nbytes)
        source, stream = rank.arena.base + result.offset, rank.streams[Stream.UPDATE]
        self.parities = [0] * RESULTS  # of the event at the end of each step
        self._values: list[NDArray[Any]] = []
        self._takes: list[Call] = []
        for start in range(0, RESULTS * nbytes, nbytes):
            here = self._pinned.bytes[start : start + result.nbytes]
            self._values.append(np.frombuffer(here, result.dtype.numpy))
            copied = self._pinned.address + start, source, result.nbytes, DEVICE_TO_HOST, stream
            self._takes.append(rank.platform.cudart.prepare("cudaMemcpyAsync", *copied))

    def take(self, step: int) -> Call:
        """The call that enqueues the copy of a step's result on UPDATE."""
        return self._takes[step % RESULTS]

    def values(self, step: int) -> NDArray[Any]:
        """A copy of the elements, of a step that is complete and at most ``RESULTS`` back."""
        return self._values[step % RESULTS].copy()

    def close(self) -> None:
        """Give the memory back. Nothing may be running."""
        self._values.clear()
        self._pinned.close()
