"""Marks in graphs: how far a rank is (``Watch``), and when its stages ran (``Tracer``).

A beat is a node that no work waits for: it writes a counter to pinned host memory, where the
waiting thread reads it without any call of CUDA. The beats of a graph make one side branch. A stamp
is a node before or behind a stage that writes the device's clock; only a program captured for a
trace has stamps.
"""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from trlow.device import Pinned
from trlow.errors import UsageError
from trlow.nodes import add_leaf, is_capturing, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trlow.device import Platform
    from trlow.kernel import Kernels
    from trlow.nodes import Place

BEATS = 4096  # how many places in graphs a rank can watch
WORD = 8  # bytes of a counter and of a stamp
WATCH_KERNELS, TRACE_KERNELS = ("beat",), ("stamp", "next_row")
DEVICE_TO_HOST = 2  # cudaMemcpyKind


class Zeroed:
    """Device memory of one rank outside of its arena, zeroed. On the rank's own thread."""

    def __init__(self, platform: Platform, nbytes: int, stream: int) -> None:
        self._platform = platform
        pointer = c_void_p()
        platform.cudart.cudaMalloc(byref(pointer), nbytes)
        self.address: int = pointer.value or 0
        try:
            platform.cudart.cudaMemsetAsync(self.address, 0, nbytes, stream)
            platform.cudart.cudaStreamSynchronize(stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.address:
            address, self.address = self.address, 0
            self._platform.cudart.cudaFree(address)


class Watch:
    """The beats of one rank. Made and closed on its thread, read by any."""

    def __init__(self, platform: Platform, kernels: Kernels, stream: int) -> None:
        self._platform = platform
        self._kernels = kernels
        self._names: dict[int, str] = {}  # by index, in the order in which they were placed
        self._free = list(range(BEATS))
        self._taken: list[int] = []  # by the graph that is being captured
        self._place: Place | None = None  # of the newest beat, and its node
        self._leaf = 0
        self._counters: Zeroed | None = None
        self._pinned = Pinned(platform, BEATS * WORD)
        self._beats: NDArray[np.int64] = np.frombuffer(self._pinned.bytes, np.int64)
        self._beats[:] = 0
        self._start = self._beats.copy()
        try:
            self._counters = Zeroed(platform, BEATS * WORD, stream)
            ready(platform, kernels, WATCH_KERNELS, self._counters.address, stream)
        except BaseException:
            self.close()
            raise

    def begin_capture(self) -> list[int]:
        """The next beat is the first of its graph. Returns the list of what the graph will take."""
        self._place, self._taken = None, []
        return self._taken

    def give_back(self, taken: list[int]) -> None:
        """Reuse the places of a graph that is destroyed."""
        for index in taken:
            del self._names[index]
        self._free += taken
        taken.clear()

    def mark(self, name: str, stream: int) -> None:
        """Leave a beat called ``name`` at this place of a capture; nothing in an eager step.

        Raises ``UsageError`` when a rank has more places than it can watch.
        """
        if self._counters is None or not is_capturing(self._platform, stream):
            return
        here, last, leaf = place_of(self._platform, stream), self._place, self._leaf
        if last is not None and here.is_same(last):
            self._names[self._taken[-1]] += f", {name}"  # nothing between: one beat tells both
            return
        if not self._free:
            raise UsageError(f"a rank can watch {BEATS} places in graphs; release some replays")
        index = self._free.pop(0)
        self._names[index] = name
        self._taken.append(index)
        counter, slot = self._counters.address + WORD * index, self._pinned.address + WORD * index
        self._place, self._leaf = add_leaf(
            self._platform,
            stream,
            lambda: self._kernels.launch("beat", (counter, slot, 1), 1, stream),
            None if last is None else leaf,
        )

    def begin(self) -> None:
        """Count from here on."""
        self._start = self._beats.copy()

    @property
    def value(self) -> int:
        """Changes whenever a beat was left."""
        return int(self._beats.sum())

    @property
    def last(self) -> str:
        """The place that the rank reached last since ``begin``.

        Places of one graph beat in order and equally often, so it is the last of those that beat
        most often.
        """
        counts = self._beats - self._start
        most = int(counts.max(initial=0))
        reached = [name for index, name in self._names.items() if counts[index] == most]
        return f"{reached[-1]} (time {most})" if most and reached else "nothing yet"

    def close(self) -> None:
        """Give the memory back; no graph with beats may be launched any more."""
        self._beats = self._start = np.zeros(BEATS, np.int64)
        if self._counters is not None:
            self._counters.close()
        self._pinned.close()


class Tracer:
    """The stamps of one rank for a program: ``rows`` steps in turn, two entries a stage."""

    def __init__(
        self, platform: Platform, kernels: Kernels, stream: int, places: int, rows: int
    ) -> None:
        self._platform = platform
        self._kernels = kernels
        self._stream = stream
        self.shape = (rows, places, 2)
        self._slots = Zeroed(platform, (rows * places * 2 + 1) * WORD, stream)
        self._row = self._slots.address + rows * places * 2 * WORD
        try:
            ready(platform, kernels, TRACE_KERNELS, self._row, stream)
        except BaseException:
            self.close()
            raise

    def stamp(self, place: int, end: int, stream: int) -> None:
        """Enqueue the writing of the clock: ``end`` is 0 before a stage and 1 behind it."""
        rows, places, _ = self.shape
        values = (self._slots.address, self._row, 2 * place + end, 2 * places, rows)
        self._kernels.launch("stamp", values, 1, stream)

    def next_row(self, stream: int) -> None:
        """Enqueue the step to the next row."""
        self._kernels.launch("next_row", (self._row, 1), 1, stream)

    def read(self) -> NDArray[np.int64]:
        """All stamps in ns on the rank's own clock, shape (rows, places, 2); 0: not written."""
        stamps = np.empty(self.shape, np.int64)
        self._platform.cudart.cudaMemcpyAsync(
            stamps.ctypes.data, self._slots.address, stamps.nbytes, DEVICE_TO_HOST, self._stream
        )
        self._platform.cudart.cudaStreamSynchronize(self._stream)
        return stamps

    def close(self) -> None:
        """Give the memory back."""
        self._slots.close()


def ready(
    platform: Platform, kernels: Kernels, names: Sequence[str], address: int, stream: int
) -> None:
    """Load kernels and launch each with nothing to do, so that none is a first use later."""
    kernels.load(names)
    for name in names:
        kernels.warm(name, address, stream)
    platform.cudart.cudaStreamSynchronize(stream)
