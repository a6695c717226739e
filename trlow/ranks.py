"""Persistent threads: one per rank and one coordinator, and the one place that waits for them.

A rank's device work (warm-up, capture, replay, teardown) always runs on that rank's own thread, and
groups of collectives always run on the coordinator. Both kinds are daemons that live as long as
their runtime. The thread that asks waits in Python with a timeout, never inside C, so that Ctrl-C
and a deadline always reach it.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from trlow.errors import CaptureError, ForeignError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
POLL_S = 0.05  # how soon the waiting thread notices another rank's failure
GRACE_S = 10.0  # how long ranks may take to come back after an abort


class PeerFailedError(Exception):
    """This rank stopped because another one failed. Never the error that a caller sees."""


class Status:
    """What one rank is doing, for error messages and for the progress watch.

    The rank's own thread writes all but ``stop``, which tells it to begin no further step. An
    ``idle`` rank has finished everything, its device too, and waits for the caller.
    """

    __slots__ = ("failed_at", "idle", "op", "stage", "step", "stop")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Back to idle."""
        self.step: int | None = None
        self.stage: str | None = None
        self.op: str | None = None
        self.failed_at: float | None = None  # on the monotonic clock, before peers can know
        self.stop = False
        self.idle = False

    def __str__(self) -> str:
        if self.step is None and self.stage is None:
            return "idle"
        parts = [] if self.step is None else [f"step {self.step}"]
        parts += [] if self.stage is None else [f"stage {self.stage}"]
        return " ".join(parts)


class Job:
    """One function running on one worker, and what became of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        """Run the function once, on the worker's thread; an exception is kept, not raised."""
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  kept for the waiting thread to raise
            self.error = error
        self.ended_at = time.monotonic()
        self._finished.set()

    def cancel(self) -> None:
        """It never came to a worker: done, as one that stopped because of a peer."""
        self.error = PeerFailedError("never begun")
        self.ended_at = time.monotonic()
        self._finished.set()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s``; whether it is done."""
        return self._finished.wait(timeout_s)


class Worker:
    """A daemon thread that runs jobs one after another in the order they were submitted."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # The thread holds the queue and not the worker, so that a forgotten owner can be collected.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Job:
        """Queue ``function`` and return its job at once."""
        return self.queue(Job(function))

    def queue(self, job: Job) -> Job:
        """Queue a job that was made before."""
        self._jobs.put(job)
        return job

    @property
    def ident(self) -> int:
        """Python's identifier of the thread."""
        return self._thread.ident or 0

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this worker's thread."""
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the jobs before this call; whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job


class Ranks:
    """A worker per rank, a coordinator, each rank's status, and waiting with a deadline."""

    def __init__(self, devices: Sequence[int], deadline_s: float) -> None:
        self.devices = tuple(devices)
        self.deadline_s = deadline_s
        self.statuses = tuple(Status() for _ in devices)
        self.workers = tuple(Worker(f"trlow-rank-{rank}") for rank in range(len(devices)))
        self.coordinator = Worker("trlow-coordinator")

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def threads(self) -> list[tuple[str, int]]:
        """(name, identifier) of every thread."""
        named = [(f"rank {rank}", worker.ident) for rank, worker in enumerate(self.workers)]
        return [*named, ("coordinator", self.coordinator.ident)]

    def jobs(self, function: Callable[[int], Any]) -> list[Job]:
        """A job ``function(rank)`` for every rank, not queued yet."""

        def bound(rank: int) -> Callable[[], Any]:
            return lambda: function(rank)

        return [Job(bound(rank)) for rank in range(len(self))]

    def queue(self, jobs: Sequence[Job]) -> None:
        """Queue the ranks' jobs, and the coordinator's if there is one more.

        Interrupted in between (Ctrl-C), those that did not come to a worker count as done.
        """
        workers = (*self.workers, self.coordinator)
        queued = 0
        try:
            for worker, job in zip(workers, jobs, strict=False):
                worker.queue(job)
                queued += 1
        except BaseException:
            for job in jobs[queued + 1 :]:
                job.cancel()
            if queued < len(jobs) and not jobs[queued].wait(POLL_S):
                jobs[queued].cancel()
            raise

    def submit(self, function: Callable[[int], Any]) -> list[Job]:
        """Run ``function(rank)`` on every rank's thread."""
        jobs = self.jobs(function)
        self.queue(jobs)
        return jobs

    def join(
        self,
        jobs: Sequence[Job],
        *,
        on_stop: Callable[[], None],
        progress: Callable[[], object] | None = None,
        deadline_s: float | None = None,
    ) -> BaseException | None:
        """Wait until all jobs are done or one fails, nothing moves, or Ctrl-C arrives.

        ``progress`` returns a value that changes while there is any; without it the deadline
        counts from the call. When the wait ends early ``on_stop`` runs once and the jobs get
        ``GRACE_S`` to come back. Returns the error to raise, or None; Ctrl-C passes through.
        """
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        try:
            reason = self._watch(jobs, limit_s, progress)
            if reason is None:
                return None
        except BaseException:
            on_stop()
            self.settle(jobs)
            raise
        peers = self.describe()
        failed_by_itself = any(job.error is not None for job in jobs)
        on_stop()
        if not self.settle(jobs):
            stuck = [f"job {index}" for index, job in enumerate(jobs) if not job.done]
            reason = f"{reason}; {', '.join(stuck)} did not come back within {GRACE_S:g} s"
        elif failed_by_itself:
            return self.first_failure(jobs)
        return RankError(reason, rank=None, step=None, stage=None, peers=peers)

    def finish(self, jobs: Sequence[Job]) -> None:
        """Wait as ``join`` does, with nothing to stop; raises what it returns."""
        error = self.join(jobs, on_stop=lambda: None)
        if error is not None:
            raise error

    def _watch(
        self, jobs: Sequence[Job], limit_s: float, progress: Callable[[], object] | None
    ) -> str | None:
        """None when all jobs ended well, otherwise why the wait ended."""
        last = progress() if progress else None
        deadline = time.monotonic() + limit_s
        while True:
            if any(job.done and job.error is not None for job in jobs):
                return "a rank failed"
            pending = [job for job in jobs if not job.done]
            if not pending:
                return None
            pending[0].wait(POLL_S)
            if progress and (value := progress()) != last:
                last, deadline = value, time.monotonic() + limit_s
            if time.monotonic() > deadline:
                return f"no progress for {limit_s:g} s"

    def settle(self, jobs: Sequence[Job], timeout_s: float = GRACE_S) -> bool:
        """Wait for jobs whatever their outcome; whether all came back in time."""
        deadline = time.monotonic() + timeout_s
        return all(job.wait(max(0.0, deadline - time.monotonic())) for job in jobs)

    def first_failure(self, jobs: Sequence[Job]) -> BaseException | None:
        """The error that came first, not counting ranks that only stopped because of a peer.

        In a capture one that names a rank says more than the coordinator's about the same group.
        """
        noticed = [status.failed_at for status in self.statuses]
        noticed += [None] * (len(jobs) - len(noticed))
        errors = [
            (at or job.ended_at, job.error)
            for job, at in zip(jobs, noticed, strict=False)
            if job.error is not None
        ]
        own = [pair for pair in errors if not isinstance(pair[1], PeerFailedError)]
        captures = [pair for pair in own if isinstance(pair[1], CaptureError)]
        named = [pair for pair in captures if getattr(pair[1], "rank", None) is not None]
        return min(named or own or errors, key=lambda pair: pair[0], default=(0.0, None))[1]

    def locate(self, error: BaseException, rank: int) -> BaseException:
        """``error`` with rank and device where it is a failed C call that does not name them."""
        if isinstance(error, ForeignError) and error.rank is None:
            return error.with_rank(rank, self.devices[rank])
        return error

    def located(self, function: Callable[[int], T]) -> Callable[[int], T]:
        """``function(rank)`` whose failed C calls name rank and device."""

        def call(rank: int) -> T:
            try:
                return function(rank)
            except ForeignError as error:
                raise self.locate(error, rank) from error

        return call

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(rank)`` on every rank's thread, with the results; no collective involved."""
        jobs = self.submit(self.located(function))
        self.finish(jobs)
        return [job.result for job in jobs]

    def describe(self, but: int | None = None) -> str:
        """What every rank, or every one ``but`` one, was doing, in words."""
        return ", ".join(
            f"rank {rank}: {status}" for rank, status in enumerate(self.statuses) if rank != but
        )

    def stop(self, timeout_s: float = GRACE_S) -> bool:
        """End all threads; whether every one ended in time."""
        ended = [worker.stop(timeout_s) for worker in (*self.workers, self.coordinator)]
        return all(ended)
