"""One call of a runtime at a time.

Ranks work on one thing at once, so a second thread waits for its turn; the holder's own deadline is
the proof that it comes. A call from inside another (a fill or a callback on a rank's thread, a
progress function) could wait for itself and is refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection


class Turn:
    """``check()``, then ``with turn.lock:`` and ``taken()`` first in its body.

    The lock itself is the context manager: its release is one C call, which Ctrl-C cannot split.
    ``insiders`` are the ranks' and the coordinator's threads.
    """

    def __init__(self, insiders: Collection[int]) -> None:
        self.lock = threading.Lock()
        self._insiders = frozenset(insiders)
        self._holder: int | None = None
        # A run as long as its caller likes: nobody may wait for it, so it does not hold the lock.
        self.lasting = False

    def taken(self, *, closing: bool = False) -> None:
        """The calling thread holds the lock. Raises ``UsageError`` as ``check`` does."""
        self._holder = threading.get_ident()
        if not closing:
            self._refuse_lasting()

    def _refuse_lasting(self) -> None:
        if self.lasting:
            raise UsageError(
                "a stepper has the runtime: its steps come one by one whenever the caller likes; "
                "end() it first"
            )

    def check(self, *, closing: bool = False) -> None:
        """Raise ``UsageError`` where waiting could have no end; ``closing`` stops what lasts."""
        me = threading.get_ident()
        if me in self._insiders:
            raise UsageError(
                "called on a rank's own thread (a fill or a callback), which cannot wait for "
                "itself; there only copies to and from that rank's own arena are possible"
            )
        if not closing:
            self._refuse_lasting()
        if self.lock.locked() and self._holder == me:
            raise UsageError(
                "called from inside another call of the same runtime (a progress function); "
                "call it when that has returned"
            )
