"""Pinned input slots: what the host writes for a step before that step is launched.

Each rank has one slot per letter ("A", "B"), laid out exactly as the plan's input span, so that one
copy fills the device's twin. A DTensor "a.label" of slot A and "b.label" of slot B are both
``slot["label"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.device import Pinned
from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from trlow.device import Platform
    from trlow.plan import MemoryPlan, Range


class FeedSlot:
    """The inputs of one step of one rank as writable numpy arrays by name."""

    def __init__(self, letter: str, views: dict[str, NDArray[Any]]) -> None:
        self.letter = letter
        self._views = views

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The array of one input. Raises ``UsageError`` for an unknown name."""
        try:
            return self._views[name]
        except KeyError:
            message = f"no input is named {name!r}; slot {self.letter} has {', '.join(self)}"
            raise UsageError(message) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Feed:
    """The slots of one rank. Made and closed on the rank's own thread."""

    def __init__(self, platform: Platform, plan: MemoryPlan) -> None:
        self._platform = platform
        self._plan = plan
        self._pinned: dict[str, tuple[Range, Pinned]] = {}
        self._slots: dict[tuple[str, str | None], FeedSlot] = {}

    def prepare(self, letter: str, span: Range, variant: str | None) -> FeedSlot:
        """Make the slot of ``letter`` if it is new. ``span`` is where its bytes go in the arena.

        ``variant`` chooses the shapes of the arrays; every variant shares the memory.
        """
        if letter not in self._pinned:
            pinned = Pinned(self._platform, span.nbytes)
            self._pinned[letter] = span, pinned
            np.frombuffer(pinned.bytes, np.uint8)[:] = 0
        known, pinned = self._pinned[letter]
        if known != span:
            message = f"slot {letter} holds {known.first}..{known.last}, asked for {span}"
            raise UsageError(message)
        if (letter, variant) not in self._slots:
            views = self._views(pinned.bytes, span, variant)
            self._slots[letter, variant] = FeedSlot(letter, views)
        return self._slots[letter, variant]

    def _views(
        self, whole: memoryview, span: Range, variant: str | None
    ) -> dict[str, NDArray[Any]]:
        views: dict[str, NDArray[Any]] = {}
        for stored in self._plan.tensors:
            if not span.offset <= stored.offset < span.end:
                continue
            tensor = self._plan.tensor(stored.name, variant)
            start = tensor.offset - span.offset
            flat = np.frombuffer(whole, tensor.dtype.numpy, tensor.count, start)
            views[tensor.name.split(".", 1)[-1]] = flat.reshape(tensor.shape)
        return views

    def span(self, letter: str) -> Range:
        """Where the bytes of a slot go in the arena."""
        return self._pinned[letter][0]

    def source(self, letter: str) -> int:
        """The pinned address of a slot."""
        return self._pinned[letter][1].address

    def close(self) -> None:
        """Give the pinned memory back; views must not be used afterwards."""
        self._slots.clear()
        while self._pinned:
            _, (_, pinned) = self._pinned.popitem()
            pinned.close()
