"""The communicators that join a team's ranks: made when needed, registered, aborted, given back.

A team has one set at a time or none; an abort ends a set, and the next use makes another. All of
it runs on the coordinator, and the thread that asks waits in Python.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trlow.communicator import Communicators
from trlow.ranks import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.arena import Arena
    from trlow.device import Platform
    from trlow.errors import TrlowError
    from trlow.ranks import Job, Ranks


class Connection:
    """The current communicators, and how many were made before them.

    With ``window`` the arenas of all ranks are one symmetric window of every set.
    """

    def __init__(self, platform: Platform, ranks: Ranks, *, window: bool) -> None:
        self._platform = platform
        self._ranks = ranks
        self._window = window
        self.communicators: Communicators | None = None
        self.generation = 0  # counts the communicators made so far

    def connect(self, arenas: Sequence[Arena]) -> None:
        """Make communicators if there are several ranks and none yet, and register ``arenas``."""
        if len(self._ranks) == 1 or self.communicators is not None:
            return
        job = self._submit(lambda: Communicators(self._platform, self._ranks.devices))
        try:
            self._ranks.finish([job])
        except BaseException:  # they may come into being later: then nobody wants them
            self._submit(lambda: job.result and job.result.close())
            raise
        self.communicators = job.result
        self.generation += 1
        self.register(arenas)

    def register(self, arenas: Sequence[Arena]) -> None:
        """Make the arenas, if there are any yet, a window, where that was asked for."""
        communicators = self.communicators
        if not self._window or communicators is None or not arenas:
            return
        bases, nbytes = [arena.base for arena in arenas], arenas[0].nbytes
        try:
            self._ranks.finish([self._submit(partial(communicators.register, bases, nbytes))])
        except BaseException:
            self.communicators = None  # without the window they are not what was asked for
            self._ranks.settle([self._submit(communicators.close)])
            raise

    @property
    def aborting(self) -> bool:
        """Whether an abort has begun that ``join_abort`` has not ended."""
        return self.communicators is not None and self.communicators.aborting

    def join_abort(self) -> TrlowError | None:
        """Wait for the abort that has begun, whose graphs are destroyed; what went wrong, if any.

        Afterwards there are no communicators.
        """
        communicators = self.communicators
        failure = None if communicators is None else communicators.join_abort(GRACE_S)
        self.communicators = None
        return failure

    def release(self) -> list[Job]:
        """Begin to give the communicators back: their windows, then themselves."""
        communicators = self.communicators
        return [] if communicators is None else [self._submit(communicators.close)]

    def _submit(self, function: Callable[[], object]) -> Job:
        return self._ranks.coordinator.submit(function)
