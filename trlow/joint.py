"""One function on all ranks at once: how each begins, what is watched, how all of it is stopped."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trlow.errors import ForeignError, RankError, TrlowError
from trlow.incident import rank_error, report
from trlow.ranks import PeerFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.communicator import Communicators
    from trlow.device import Platform
    from trlow.enqueue import Rank, Rendezvous
    from trlow.ranks import Job, Ranks

DRAW_S = 0.5  # between two calls of a caller's progress function
PATIENCE = 20  # how often Ctrl-C is put off while ranks are stopped
BACK_S = 1.0  # how long ranks may take to come back by themselves before an abort


@dataclass(frozen=True, slots=True)
class Part:
    """What every rank's part of a joint run has in common; each runs it on its own thread."""

    platform: Platform
    ranks: Ranks
    communicators: Communicators | None
    rendezvous: Rendezvous | None
    gate: threading.Barrier | None  # where ranks wait until all have begun

    def run(self, member: Rank, function: Callable[[Rank], Any]) -> Any:
        """``function(member)``; with a gate, declared as issuing and not before all ranks are."""
        if self.gate is None:
            return self._guarded(member, function, TrlowError)
        with self.platform.issuing():
            try:
                self.gate.wait()
            except threading.BrokenBarrierError:
                raise PeerFailedError("a rank never began") from None
            return self._guarded(member, function, RankError)

    def _guarded(
        self, member: Rank, function: Callable[[Rank], Any], known: type[TrlowError]
    ) -> Any:
        """A failure is told to the peers and says rank, step and stage.

        Errors of the ``known`` kind speak for themselves. In a loop of steps that is ``RankError``
        alone: whatever a fill raises is told with the step.
        """
        try:
            return function(member)
        except BaseException as error:
            member.status.failed_at = time.monotonic()
            if self.rendezvous is not None:
                self.rendezvous.stop()
            if isinstance(error, (PeerFailedError, known)) and not isinstance(error, ForeignError):
                raise
            raise rank_error(self.ranks, member, error, self.communicators) from error


@dataclass(slots=True)
class JointRun:
    """The jobs of one call of ``Team.together``, the coordinator's last if it has one."""

    ranks: Ranks
    members: Sequence[Rank]
    communicators: Communicators | None
    jobs: list[Job]
    rendezvous: Rendezvous | None
    gate: threading.Barrier | None
    abort: bool  # at once, or only where ranks do not come back by themselves
    progress: Callable[[int], None] | None
    report: str = ""  # where everybody stood when it was stopped
    stopped_by: str = ""  # what stopped it from outside, if anything did
    _drawn_at: float = field(default_factory=time.monotonic)

    def stop(self) -> None:
        """Tell every rank to begin nothing more, and free those that a collective holds."""
        self.report = report(self.ranks, self.members, self.communicators)
        for status in self.ranks.statuses:
            status.stop = True
        if self.rendezvous is not None:
            self.rendezvous.stop()
        if self.gate is not None:
            self.gate.abort()
        late = self.abort or not self.ranks.settle(self.jobs, BACK_S)
        if late and self.communicators is not None:
            self.communicators.start_abort()

    def end(self) -> None:
        """Stop, and wait until the ranks are back."""
        self.stop()
        self.ranks.settle(self.jobs)

    def explained(self, error: BaseException) -> BaseException:
        """``error`` with what was gathered; an error of its own for a run that was told to stop."""
        if self.stopped_by or isinstance(error, PeerFailedError):
            reason = self.stopped_by or "a peer"
            stopped = RankError(
                f"the run was stopped by {reason}", rank=None, step=None, stage=None
            )
            stopped.__cause__ = error
            error = stopped
        if isinstance(error, RankError):
            error.report = self.report
        return error

    def moved(self) -> object:
        """Changes while anything moves on any rank; tells the caller at most twice a second."""
        statuses = self.ranks.statuses
        if self.progress is not None and time.monotonic() - self._drawn_at > DRAW_S:
            self._drawn_at = time.monotonic()
            self.progress(min(status.step or 0 for status in statuses))
        if all(status.idle for status in statuses):
            return time.monotonic()  # the caller's time, not the ranks'
        beats = [member.watch.value for member in self.members if member.watch is not None]
        return [*((status.step, status.stage, status.op) for status in statuses), *beats]


def persist(function: Callable[[], None]) -> None:
    """Run ``function``, which may be repeated, to its end although Ctrl-C arrives meanwhile."""
    for _ in range(PATIENCE):
        try:
            function()
        except KeyboardInterrupt:
            continue
        return
