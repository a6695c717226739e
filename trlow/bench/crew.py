"""All ranks of a measurement on persistent threads, and the lanes that issue their work.

A lane is a thread that issues: each rank's own (`threads`), or the coordinator for all (`group`),
as nccl-tests' -t and -g. Making and closing, and filling and reading buffers, always run on the
rank's own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from trlow.bench.links import Links
from trlow.bench.seat import Seat, add_factor, open_seat
from trlow.errors import RankError
from trlow.ranks import Ranks

if TYPE_CHECKING:
    from trlow.bench.job import Job
    from trlow.binding.clib import Prepared
    from trlow.device import Platform
    from trlow.ranks import Job as Running
    from trlow.ranks import Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A thread and the ranks it issues for."""

    worker: Worker
    seats: tuple[Seat, ...]

    def current(self, seat: Seat) -> None:
        """Make a rank's device current; a lane of one rank keeps its own all the time."""
        if len(self.seats) > 1:
            seat.platform.cudart.cudaSetDevice(seat.device)

    def of_each(self, make: Callable[[Seat], Prepared]) -> list[Prepared]:
        """`make` of every rank, each where its device is current."""
        if len(self.seats) == 1:
            return [make(self.seats[0])]
        return [one for seat in self.seats for one in (seat.make_current(), make(seat))]

    def synchronize(self) -> None:
        """Wait for every rank's stream."""
        for seat in self.seats:
            self.current(seat)
            seat.synchronize()


class Crew:
    """Threads, communicators and seats. Closed in the order graphs, links, seats, threads."""

    def __init__(self, platform: Platform, job: Job, devices: tuple[int, ...], deadline_s: float):
        self.platform = platform
        self.job = job
        self.ranks = Ranks(devices, deadline_s)
        self._stacks = [ExitStack() for _ in devices]
        made = self.ranks.coordinator.submit(lambda: Links(platform, job, devices))
        self._finish([made])
        self.links: Links = made.result
        self.seats: tuple[Seat, ...] = tuple(self.on_ranks(self._open, seated=False))
        self._finish([self.ranks.coordinator.submit(lambda: self.links.prepare(self.seats))])
        if job.variant.launch == "group":
            self.lanes: tuple[Lane, ...] = (Lane(self.ranks.coordinator, self.seats),)
        else:
            pairs = zip(self.ranks.workers, self.seats, strict=True)
            self.lanes = tuple(Lane(worker, (seat,)) for worker, seat in pairs)

    def _open(self, rank: int) -> Seat:
        device, stack = self.ranks.devices[rank], self._stacks[rank]
        seat = open_seat(self.platform, self.job, rank, device, stack)
        if self.job.variant.mean is not None:
            add_factor(seat, self.job, len(self.ranks), stack)
        return seat

    def on_ranks(self, function: Callable[..., T], *, seated: bool = True) -> list[T]:
        """`function(seat)` on every rank's thread, without collectives; `rank` if not seated."""

        def of_rank(rank: int) -> T:
            return function(self.seats[rank] if seated else rank)

        jobs = self.ranks.submit(self.ranks.located(of_rank))
        self._finish(jobs)
        return [job.result for job in jobs]

    def on_lanes(self, function: Callable[[Lane], T]) -> list[T]:
        """`function(lane)` on every lane's thread, begun together; it may issue collectives.

        A failure aborts the communicators, so that no peer waits for ever; the crew is of no use
        then. Raises RankError, ForeignError.
        """
        gate = threading.Barrier(len(self.lanes), timeout=self.ranks.deadline_s)

        def begin(lane: Lane) -> T:
            with self.platform.issuing():
                gate.wait()
                try:
                    return function(lane)
                except BaseException:
                    # Noted before its peers can know: theirs is not the first error.
                    status = self.ranks.statuses[self.lanes.index(lane)]
                    status.failed_at = time.monotonic()
                    raise

        for status in self.ranks.statuses:
            status.clear()
        jobs = [lane.worker.submit(_bound(begin, lane)) for lane in self.lanes]
        self._finish(jobs, self.links.abort)
        return [job.result for job in jobs]

    def _finish(self, jobs: list[Running], on_stop: Callable[[], None] = lambda: None) -> None:
        error = self.ranks.join(jobs, on_stop=on_stop)
        own = [job.error for job in jobs if job.error is not None]
        if isinstance(error, RankError) and own:
            raise own[0]  # what a rank said itself beats that another did not come back
        if error is not None:
            raise error

    def drop_graphs(self) -> None:
        """Destroy all graphs, on the threads that captured them."""
        for lane in self.lanes:
            self._finish([lane.worker.submit(_bound(_drop, lane))])

    def close(self) -> None:
        """Give everything back."""
        self.drop_graphs()
        self._finish([self.ranks.coordinator.submit(lambda: self.links.close(self.seats))])
        self.on_ranks(lambda rank: self._stacks[rank].close(), seated=False)
        self.ranks.stop()


def _drop(lane: Lane) -> None:
    for seat in lane.seats:
        lane.current(seat)
        seat.drop_graphs()


def _bound(function: Callable[[Lane], T], lane: Lane) -> Callable[[], T]:
    return lambda: function(lane)
