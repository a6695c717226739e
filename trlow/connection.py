"""The communicators that join a team's ranks: made when needed, registered, aborted, given back.

A team has one set at a time or none; an abort ends a set, and the next use makes another. A set
that was given by others is used and left alone, and nothing takes its place once it was aborted.
All of it runs on the coordinator, and the thread that asks waits in Python.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trlow.communicator import Communicators
from trlow.errors import UsageError
from trlow.ranks import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.arena import Arena
    from trlow.device import Platform
    from trlow.errors import TrlowError
    from trlow.ranks import Job, Ranks

GONE = "the communicators that were given to the runtime were aborted after a failure"


class Connection:
    """The current communicators, and how many were made before them.

    With ``window`` the arenas of all ranks are one symmetric window of every set.
    """

    def __init__(
        self,
        platform: Platform,
        ranks: Ranks,
        *,
        window: bool,
        given: Sequence[int] | None = None,
    ) -> None:
        self._platform = platform
        self._ranks = ranks
        self._window = window
        self._given = given
        self.communicators: Communicators | None = None
        self.generation = 0  # counts the communicators made so far

    def connect(self, arenas: Sequence[Arena]) -> None:
        """Make communicators if there are several ranks and none yet, and register ``arenas``.

        Raises ``UsageError`` where those that were given are gone, or do not fit.
        """
        if len(self._ranks) == 1 or self.communicators is not None:
            return
        if self._given is not None and self.generation:
            raise UsageError(f"{GONE}; close this runtime and make one with new communicators")
        job = self._submit(self._made)
        try:
            self._ranks.finish([job])
        except BaseException:  # they may come into being later: then nobody wants them
            self._submit(lambda: job.result and job.result.close())
            raise
        self.communicators = job.result
        self.generation += 1
        self.register(arenas)

    def _made(self) -> Communicators:
        if self._given is None:
            return Communicators(self._platform, self._ranks.devices)
        return Communicators(self._platform, self._ranks.devices, self._given)

    def note(self, error: BaseException) -> None:
        """Say with ``error`` that what others own has been aborted, if it has."""
        if (
            self._given is not None
            and self.generation
            and (self.communicators is None or self.aborting)
        ):
            error.add_note(f"{GONE}: their owner must not use or destroy them")

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
