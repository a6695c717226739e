"""One call of a runtime at a time.

Ranks work on one thing at once, so a second thread waits for its turn; the holder's own deadline is
the proof that it comes. A call from inside another (a fill or a callback on a rank's thread, a
progress function) could wait for itself and is refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection


class Turn:
    """A context manager that holds the turn. ``insiders`` are the ranks' and coordinator's threads.

    Raises ``UsageError`` where waiting would be waiting for oneself.
    """

    def __init__(self, insiders: Collection[int]) -> None:
        self._insiders = frozenset(insiders)
        self._lock = threading.Lock()
        self._holder: int | None = None

    def check(self) -> None:
        """Raise ``UsageError`` on a thread that must not ask for the turn."""
        me = threading.get_ident()
        if me in self._insiders:
            raise UsageError(
                "called on a rank's own thread (a fill or a callback), which cannot wait for "
                "itself; there only copies to and from that rank's own arena are possible"
            )
        if self._holder == me:
            raise UsageError(
                "called from inside another call of the same runtime (a progress function); "
                "call it when that has returned"
            )

    def __enter__(self) -> Self:
        self.check()
        self._lock.acquire()
        self._holder = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()
