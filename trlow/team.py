"""All ranks of one runtime: their threads, communicators and devices, and running on all of them.

Built in the order in which it cannot deadlock: threads, communicators, then streams and arenas.
When a rank fails, all communicators are aborted together, all graphs destroyed and new
communicators made on the next use; only where that fails too is the team dead, and it says so.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from trlow.closing import Closing
from trlow.connection import Connection
from trlow.device import check_process, forked
from trlow.enqueue import Rank, Rendezvous, introduce
from trlow.errors import RankError, UsageError
from trlow.interop import Lent
from trlow.joint import JointRun, Part, persist
from trlow.opening import Opening
from trlow.ranks import GRACE_S, POLL_S, Job, Ranks
from trlow.transport import transport_name
from trlow.turn import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.arena import Arena
    from trlow.communicator import Communicators
    from trlow.device import Platform
    from trlow.enqueue import Group
    from trlow.plan import MemoryPlan
    from trlow.ranks import Worker
    from trlow.settings import Settings

_living: weakref.WeakSet[Team] = weakref.WeakSet()


class Team:
    """One ``Rank`` per device, each on its own thread, and the coordinator.

    ``destroy_graphs(rank)`` is the owner of the graphs: it runs on each rank's thread before the
    communicators that those graphs captured can go.
    """

    def __init__(
        self,
        platform: Platform,
        plan: MemoryPlan,
        devices: Sequence[int],
        settings: Settings,
        destroy_graphs: Callable[[Rank], None],
        *,
        lent: Lent | None = None,
    ) -> None:
        """Start the threads. ``open`` makes the rest, as ``settings`` say.

        What is ``lent`` is used in place of communicators and streams of the team's own.
        """
        self._watched = settings.watch
        self._window = settings.arena == "window"
        self._lent = lent or Lent()
        self._transport = transport_name(settings.transport, platform, devices)
        self.platform, self.plan = platform, plan
        self.ranks = Ranks(devices, settings.deadline_s)
        self.members: list[Rank] = []
        self._destroy_graphs = destroy_graphs
        given = self._lent.communicators
        self._connection = Connection(platform, self.ranks, window=self._window, given=given)
        self._stacks = [ExitStack() for _ in devices]
        self._dead: str | None = None
        self._closed = False
        self._turn = Turn([ident for _, ident in self.ranks.threads])
        self._closing = Closing(
            self.ranks,
            (self._release_graphs, self._connection.release, self._drain, self._release_ranks),
        )
        self._running: JointRun | None = None
        self._leaving = False
        _living.add(self)

    def open(self) -> None:
        """Make communicators, then what every rank owns. Raises with the rank that failed."""
        self._connection.connect(())
        self.members = self.ranks.run(self._open_rank)
        introduce(self.members)
        self._connection.register(self._arenas)

    def connect(self) -> None:
        """Make communicators if there are several ranks and none yet. On the coordinator."""
        self._turn.check()
        with self._turn.lock:
            self._turn.taken()
            self.check_usable()
            self._connection.connect(self._arenas)

    @property
    def generation(self) -> int:
        """How many sets of communicators were made so far."""
        return self._connection.generation

    @property
    def _communicators(self) -> Communicators | None:
        return self._connection.communicators

    @property
    def _arenas(self) -> list[Arena]:
        return [member.arena for member in self.members]

    def _open_rank(self, rank: int) -> Rank:
        """What one rank owns, on its own thread; the stack closes it in the right order."""
        call = partial(self._call, self.ranks.workers[rank])
        status, device = self.ranks.statuses[rank], self.ranks.devices[rank]
        common = self.plan, self._window, self._watched, self._lent, self._transport
        opening = Opening(self.platform, *common)
        return opening.open(rank, device, status, call, self._stacks[rank])

    # -- running

    def _call(self, worker: Worker, function: Callable[[], Any]) -> Any:
        """Run ``function`` on a rank's thread and wait for it in Python."""
        if worker.is_current:
            return function()
        self._turn.check()
        with self._turn.lock:
            self._turn.taken()
            self.check_usable()
            located = self.ranks.located(lambda _: function())
            job = worker.submit(partial(located, self.ranks.workers.index(worker)))
            self.ranks.finish([job])
            return job.result

    def rendezvous(self, groups: Sequence[Group], *, capturing: bool = False) -> Rendezvous | None:
        """A meeting place for ``groups``; None for a single rank, which never meets anybody."""
        if len(self.ranks) == 1:
            return None
        return Rendezvous(len(self.ranks), self.ranks.deadline_s, groups, capturing)

    def together(
        self,
        function: Callable[[Rank], Any],
        *,
        rendezvous: Rendezvous | None = None,
        abort: bool = True,
        launches: bool = False,
        lasting: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """``function(rank)`` on every rank's thread, the coordinator serving ``rendezvous``.

        ``launches`` says that ranks launch collectives by themselves: then none begins before all
        are declared as issuing. ``progress(step)`` is called here, on the waiting thread, at most
        twice a second, with the step that the slowest rank is at. A failure stops every rank: with
        ``abort`` all communicators are aborted and all graphs destroyed, without it only when ranks
        do not come back by themselves. A ``lasting`` run goes on for as long as its caller likes;
        other calls of the runtime are refused meanwhile.
        """
        self._turn.check()
        with self._turn.lock:
            self._turn.taken()
            self.check_usable()
            if not lasting:
                return self._joint(function, rendezvous, abort, launches, progress)
            self._turn.lasting = True
        try:
            return self._joint(function, rendezvous, abort, launches, progress)
        finally:
            self._turn.lasting = False

    def _joint(
        self,
        function: Callable[[Rank], Any],
        rendezvous: Rendezvous | None,
        abort: bool,
        launches: bool,
        progress: Callable[[int], None] | None,
    ) -> list[Any]:
        members, statuses = self.members, self.ranks.statuses
        for status in statuses:
            status.clear()
        for member in members:
            if member.watch is not None:
                member.watch.begin()
        gate = threading.Barrier(len(members), timeout=self.ranks.deadline_s) if launches else None
        communicators = self._communicators
        part = Part(self.platform, self.ranks, communicators, rendezvous, gate)
        jobs = self.ranks.jobs(lambda rank: part.run(members[rank], function))
        if rendezvous is not None and communicators is not None:
            jobs.append(Job(partial(rendezvous.serve, communicators, members)))
        run = JointRun(self.ranks, members, communicators, jobs, rendezvous, gate, abort, progress)
        self._running = run
        try:
            self.ranks.queue(jobs)
            error = self.ranks.join(jobs, on_stop=run.stop, progress=run.moved)
        except BaseException as stopped:
            persist(run.end)  # a second Ctrl-C must not leave ranks half stopped
            persist(partial(self._recover, jobs, abort=abort))
            self._connection.note(stopped)
            raise
        finally:
            self._running = None
            if self._leaving:
                threading.Event().wait()  # a daemon at interpreter exit: nobody hears its error
        if error is not None:
            self._recover(jobs, abort=abort)
            explained = run.explained(error)
            self._connection.note(explained)
            raise explained
        return [job.result for job in jobs[: len(members)]]

    def leave(self) -> None:
        """The interpreter ends while ranks may still run: stop them as after a failure.

        A collective that only some ranks have launched would keep the process from ending.
        """
        self._leaving = True
        run = self._running
        if run is None or forked():
            return
        run.stop()
        self.ranks.settle(run.jobs)
        self._recover(run.jobs)

    # -- after a failure

    def _recover(self, jobs: Sequence[Job], *, abort: bool = False) -> None:
        """Graphs destroyed, aborts joined; the team is usable again afterwards, or dead.

        With ``abort`` also the graphs of a single rank, which has no communicators.
        """
        if not all(job.done for job in jobs):
            self._dead = "a rank did not come back after an abort"
            return
        if not self._connection.aborting and not abort:
            return
        settled = self.ranks.settle(self.ranks.submit(self._settle_rank))
        failure = self._connection.join_abort()
        if failure is not None or not settled:
            self._dead = f"recovery failed: {failure or 'a stream did not drain'}"

    def _settle_rank(self, rank: int) -> None:
        """Destroy every graph of one rank (the last abort waits for that), let streams empty."""
        self._destroy_graphs(self.members[rank])
        self.members[rank].drain()

    @property
    def dead(self) -> bool:
        """Whether recovery failed; nothing but the end of the process helps."""
        return self._dead is not None

    def check_usable(self) -> None:
        """Raise ``UsageError`` when closed or in a forked child, ``RankError`` when dead."""
        check_process()
        if self._closed or self._closing.begun:
            message = "the runtime is closed; make a new one"
            raise UsageError(message)
        if self._dead is not None:
            message = f"the runtime is dead: {self._dead}; end this process"
            raise RankError(message, rank=None, step=None, stage=None)

    def close(self) -> None:
        """Graphs, windows, communicators, events and streams, arenas, threads. First error raised.

        A run of another thread is stopped first. Of a dead team nothing is released: a thread may
        still hang in C inside what would go. Nor in a forked child: it is the parent's.
        """
        if self._closed or self.dead or forked():
            self._closed = True
            return
        self._turn.check(closing=True)
        if not self._stopped():
            self._dead = "a run of another thread did not end when it was stopped"
            return
        self._turn.check(closing=True)
        with self._turn.lock:
            self._turn.taken(closing=True)
            try:
                self._closing.run()
            except Exception:
                self._closed = True
                raise
            self._closed = True

    def _stopped(self) -> bool:
        """Stop a run of another thread; whether a lasting one, which no lock waits for, ended."""
        deadline = time.monotonic() + 4 * GRACE_S  # ranks, their graphs and the aborts, with room
        while True:
            run = self._running
            if run is not None and not run.stopped_by:
                run.stopped_by = "close()"
                run.stop()
            if not self._turn.lasting:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)

    def _release_graphs(self) -> list[Job]:
        if not self.members:
            return []
        return self.ranks.submit(lambda rank: self._destroy_graphs(self.members[rank]))

    def _drain(self) -> list[Job]:
        """What a rank still copies goes to memory of another, so all end before any memory goes."""
        return self.ranks.submit(lambda rank: self.members[rank].drain()) if self.members else []

    def _release_ranks(self) -> list[Job]:
        return self.ranks.submit(lambda rank: self._stacks[rank].close())


@atexit.register
def _leave_all() -> None:
    """Runs while daemon threads still do: afterwards they stop wherever they are."""
    for team in list(_living):
        team.leave()
