"""One replayed step for each call: for a caller who brings the batches and reads the results.

``Replay.run`` replays a known number of steps and drains. A ``Stepper`` keeps one such run open on
the ranks' own threads, of one or several replays: ``step(payload)`` hands every rank one more step
and returns, at most ``RUN_AHEAD`` steps before the launches, as those are before the device. While
it is open the runtime is taken; ``end`` gives it back, and the next ``step`` opens it again.

A caller may think for as long as it likes: ranks whose devices have finished everything are idle
and no deadline runs. From the moment that a step is handed out it does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from trlow.errors import UsageError
from trlow.launching import RUN_AHEAD
from trlow.ranks import GRACE_S, POLL_S, PeerFailedError
from trlow.results import RESULTS, Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from trlow.enqueue import Rank
    from trlow.launching import RankReplay
    from trlow.plan import Range
    from trlow.replay import Replay

# (step, which replay, payload), then None for the end
Entry: TypeAlias = "SimpleQueue[tuple[int, int, Any] | None]"

FIRST_LOOK_S = 20e-6  # between two looks for a result, doubled up to POLL_S


class Result:
    """What one step left in the stepper's result range, as rank 0 has it."""

    def __init__(self, stepper: Stepper, step: int) -> None:
        self.step = step
        self._stepper: Stepper | None = stepper
        self._values: NDArray[Any] | None = None

    def values(self) -> NDArray[Any]:
        """The elements, flat; waits for the step. Raises what has become of it if it failed."""
        stepper = self._stepper
        if self._values is None and stepper is not None:
            self.take(stepper.read(self.step))
        assert self._values is not None
        return self._values

    def take(self, values: NDArray[Any]) -> None:
        """Keep them, and let go of the stepper."""
        self._values, self._stepper = values, None


class Stepper:
    """Steps of one runtime's replays, one for each call. Used by one thread.

    ``before(rank, step, payload)`` runs on each rank's own thread ahead of the launch: it enqueues
    what the step needs (copies of the batch, say) on that rank's UPDATE stream, behind which the
    graph is launched. Two steps later its payload is let go.
    """

    def __init__(
        self,
        replays: Sequence[Replay],
        before: Callable[[Rank, int, Any], None],
        result: Range | None = None,
        *,
        ahead: int = RUN_AHEAD,
    ) -> None:
        """``result`` is copied to pinned memory behind every step. Makes everything a step needs.

        With ``ahead=0`` ``step`` is back once its own step is launched, and so behind ``before``.
        Raises ``UsageError`` for a replay that is closed, and for a result of one that is staged,
        whose stages are in no order with such a copy.
        """
        if result is not None and any(replay.mode != "fused" for replay in replays):
            message = "a result is copied behind a step as a whole; capture the program fused"
            raise UsageError(message)
        self._replays = tuple(replays)
        self._size = len(self._replays[0])
        self.next_step = 0
        self._finished = 0  # rank 0's device is known to have finished the steps before this one
        self._before, self._ahead = before, ahead
        self._ring: Ring | None = None
        self._results: deque[weakref.ref[Result]] = deque()  # nobody may want most of them
        self._entry: Entry = SimpleQueue()
        self._kept: list[deque[Any]] = [deque() for _ in range(self._size)]  # payloads, by rank
        self._launched = [0] * self._size  # steps, by rank; each writes its own
        self._wanted = 0  # launches that the caller waits for: the last rank to get there tells it
        self._told: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if result is not None:
            self._ring, *_ = self._replays[0].together(
                lambda rank: Ring(rank, result) if rank.index == 0 else None
            )

    # -- the caller's side

    def step(self, payload: Any, which: int = 0) -> Result:
        """Hand one step of a replay to every rank; back once at most ``ahead`` are to launch.

        Raises what a rank raised in this step or one before; afterwards the replay is closed.
        """
        self._check()
        opening = not self._is_open
        if opening:
            self._open()
        step = self.next_step
        result = Result(self, step)
        if self._ring is not None:
            if len(self._results) == RESULTS:  # the slot of the oldest is about to be written
                oldest = self._results[0]()
                if oldest is not None:
                    oldest.values()
                self._results.popleft()  # only now: a Ctrl-C comes while it is waited for
            self._results.append(weakref.ref(result))
        # A number may be left out, where a Ctrl-C comes between the two, but is never used twice.
        self.next_step = step + 1
        # To rank 0, which tells the others: one step or none.
        self._entry.put((step, which, payload))
        # The first launch proves that the run has the runtime: whoever calls it now is refused.
        self._await_launch(step + 1 if opening else step + 1 - self._ahead)
        return result

    def read(self, step: int) -> NDArray[Any]:
        """The result of ``step``, which is at most ``RESULTS`` back; waits for it."""
        self._await_launch(step + 1)
        if self._ring is None:
            raise UsageError(
                f"the result of step {step} was not read before the runtime was closed"
            )
        # An event tells of the newest step of its parity, behind which any before it is done too.
        parity, events = self._ring.parities[step % RESULTS], self._replays[0].prepared(0)
        pause = FIRST_LOOK_S
        while self._finished <= step and not events.is_done(parity):
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return self._ring.values(step)

    def _await_launch(self, steps: int) -> None:
        """Until every rank has launched ``steps`` steps. The run's own deadline bounds it."""
        if min(self._launched) >= steps:
            return
        while not self._told.empty():  # two ranks may both have been the last
            self._told.get_nowait()
        self._wanted = steps  # before the next look, so that no launch is missed
        try:
            while min(self._launched) < steps:
                try:
                    self._told.get(timeout=POLL_S)
                except Empty:
                    self._check()
        finally:
            self._wanted = 0

    def _check(self) -> None:
        """Raise what has ended the run."""
        thread = self._thread
        if thread is not None and thread.ident and any(each.closed for each in self._replays):
            thread.join(2 * GRACE_S)  # it closes them a little before it can say why
        if self._error is not None:
            error, self._error = self._error, None
            self._forget()
            raise error
        for replay in self._replays:
            if replay.closed:
                message = f"the replay of {replay.program.name!r} is closed; capture it again"
                raise UsageError(message)

    @property
    def _is_open(self) -> bool:
        """Whether a run has begun and was not ended; a Ctrl-C may keep its thread from starting."""
        return self._thread is not None and self._thread.ident is not None

    def _open(self) -> None:
        self._entry = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="trlow-steps", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for every step that was handed out and give the runtime back.

        Raises what a rank raised; a second call does nothing.
        """
        thread = self._thread
        if thread is None:
            self._check_error()
            return
        self._entry.put(None)
        while thread.is_alive():
            thread.join(POLL_S)  # the run's own deadline ends it
        self._thread = None
        if self._error is None and self._ring is not None:
            for result in filter(None, [known() for known in self._results]):
                if result.step < min(self._launched):  # else a Ctrl-C came before it
                    result.values()
            self._results.clear()
        self._check_error()

    def _check_error(self) -> None:
        if self._error is not None:
            self._check()

    def _forget(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident:
            thread.join(GRACE_S)
        self._results.clear()

    def close(self) -> None:
        """Give the pinned memory back, also where the runtime is closed. Nothing may be running."""
        if self._ring is not None:
            ring, self._ring = self._ring, None
            ring.close()

    # -- the ranks' side

    def _run(self) -> None:
        """The whole run, on a thread of its own: it waits for the ranks with their deadline."""
        entries: list[Entry] = [self._entry, *(SimpleQueue() for _ in range(self._size - 1))]

        def loop(rank: Rank) -> None:
            self._serve(rank, [each.prepared(rank.index) for each in self._replays], entries)

        try:
            self._replays[0].together(loop, launches=True, lasting=True)
        except BaseException as error:  # noqa: BLE001  kept for the caller's thread to raise
            self._error = error

    def _serve(self, rank: Rank, mine: list[RankReplay], entries: list[Entry]) -> None:
        status, entry = rank.status, entries[rank.index]
        first = rank.index == 0
        followers, ring = (entries[1:], self._ring) if first else ((), None)
        kept = self._kept[rank.index] = deque(maxlen=RUN_AHEAD)
        numbers: deque[int] = deque(maxlen=RUN_AHEAD)  # of the steps that were launched last
        steps = 0
        while True:
            item = self._next(rank, mine[0], entry, steps)
            for follower in followers:
                follower.put(item)
            if item is None:
                break
            if status.stop:
                message = "told to stop"
                raise PeerFailedError(message)
            step, which, payload = item
            status.step = step
            if steps >= RUN_AHEAD:
                status.stage = "run-ahead"
                mine[0].wait(steps % RUN_AHEAD)  # of any replay: they share the events
                if first:
                    self._finished = numbers[0] + 1
            kept.append(payload)
            numbers.append(step)
            status.stage = "before the step"
            self._before(rank, step, payload)
            if ring is None:
                mine[which].launch(steps)
            else:
                ring.parities[step % RESULTS] = steps % RUN_AHEAD
                mine[which].launch(steps, (ring.take(step),))
            self._launched[rank.index] = step + 1
            if 0 < self._wanted <= min(self._launched):
                self._told.put(None)
            steps += 1
        self._drain(rank, mine[0], steps)
        kept.clear()

    def _drain(self, rank: Rank, mine: RankReplay, steps: int) -> None:
        """Wait for all ``steps`` of this run so far."""
        mine.drain(steps)
        if rank.index == 0:
            self._finished = self._launched[0]

    def _next(
        self, rank: Rank, mine: RankReplay, entry: Entry, steps: int
    ) -> tuple[int, int, Any] | None:
        """The next step, or None for the end. Idle from when the device has nothing left."""
        status = rank.status
        status.stage = "the caller"
        try:
            return entry.get(timeout=POLL_S)
        except Empty:
            self._drain(rank, mine, steps)
        status.idle = True
        try:
            while True:
                if status.stop:
                    message = "told to stop"
                    raise PeerFailedError(message)
                try:
                    return entry.get(timeout=POLL_S)
                except Empty:
                    continue
        finally:
            status.idle = False
