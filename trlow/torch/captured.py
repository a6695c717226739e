"""What `compile` makes: a runtime, torch's work on its ranks, their graphs, and who steps them."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

from trlow.joint import persist
from trlow.launching import RUN_AHEAD
from trlow.runtime import Runtime
from trlow.stepping import Stepper
from trlow.torch.streams import Loan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trlow.device import Platform
    from trlow.enqueue import Rank
    from trlow.plan import MemoryPlan
    from trlow.program import Program
    from trlow.replay import Replay
    from trlow.settings import Settings
    from trlow.torch.cuda import CudaSide
    from trlow.torch.host import HostSide
    from trlow.torch.member import Member
    from trlow.torch.payload import Payload


class Captured:
    """Made in this order: streams, runtime, sides, graphs, stepper. `close` takes any part."""

    def __init__(self, platform: Platform, members: Sequence[Member]) -> None:
        """The streams of all ranks."""
        self._platform, self._members = platform, members
        self._loan = Loan(platform, members)
        self.runtime: Runtime | None = None
        self.sides: list[CudaSide | HostSide] = []
        self._replays: list[Replay] = []
        self.stepper: Stepper | None = None

    def open(
        self, settings: Settings, plan: MemoryPlan, adopt: Callable[[Rank], CudaSide | HostSide]
    ) -> None:
        """A runtime; ``adopt(rank)`` moves a member in, on its own thread."""
        streams = self._loan.streams
        self.runtime = Runtime(settings, plan, platform=self._platform, streams=streams)
        self.sides = self.runtime.together(adopt)

    def capture(self, programs: Iterable[Program], *, draws: bool) -> None:
        """One replay for each. What a step ``draws`` is drawn once it is handed out."""
        assert self.runtime is not None
        gc.collect()  # a tensor that dies in a cycle during a capture may free device memory
        for program in programs:
            self._replays.append(self.runtime.capture(program))
        sides = self.sides
        self.runtime.together(lambda rank: sides[rank.index].alone(rank, sides[rank.index].settle))
        for side in sides:
            side.check()
        loss, ahead = self.runtime.plan.range("loss"), 0 if draws else RUN_AHEAD
        self.stepper = Stepper(self._replays, self._before, loss, ahead=ahead)

    def _before(self, rank: Rank, _: int, payload: Payload) -> None:
        self.sides[rank.index].before(rank, payload)

    def each(self, function: Callable[[Member], None]) -> None:
        """For every member, on its rank's own thread where there is one."""
        runtime, sides, members = self.runtime, self.sides, self._members
        if runtime is None or not sides:
            for member in members:
                function(member)
            return
        runtime.together(
            lambda rank: sides[rank.index].alone(rank, lambda: function(members[rank.index]))
        )

    def synchronize(self) -> None:
        """Wait for every step. Raises what one has failed with."""
        if self.stepper is not None:
            self.stepper.end()
        for side in self.sides:
            side.check()

    def close(self) -> None:
        """Give everything back; the modules live on in memory of their own.

        A step that has failed is a warning here.
        """
        runtime, stepper, sides = self.runtime, self.stepper, self.sides
        self.runtime, self.stepper = None, None
        failure = None
        try:
            if stepper is not None:
                persist(stepper.end)  # steps on their way ask for their sides
                if not any(replay.closed for replay in self._replays):  # else it was raised before
                    for side in sides:
                        side.check()
        except Exception as error:  # noqa: BLE001  of a module, too
            failure = error
        self.sides = []
        if runtime is None:
            self._loan.give_back()
        elif not runtime.dead:  # else a thread may hang in C inside of what would go
            try:
                self._leave(runtime, sides)
            finally:
                self._end(runtime, stepper)
        if failure is not None:
            warnings.warn(f"a step failed: {failure}", RuntimeWarning, stacklevel=4)

    def _end(self, runtime: Runtime, stepper: Stepper | None) -> None:
        try:
            runtime.close()
            if stepper is not None:
                stepper.close()
        finally:
            if not runtime.dead:
                self._loan.give_back()

    def _leave(self, runtime: Runtime, sides: Sequence[CudaSide | HostSide]) -> None:
        """Modules move out; graphs go before the pools of torch that they use, streams after."""
        members, replays = self._members, self._replays
        self._replays = []
        if not sides:  # not every rank has got that far; some may have moved in
            for member in members:
                member.leave()
            return
        runtime.together(lambda rank: sides[rank.index].alone(rank, members[rank.index].leave))
        for replay in replays:
            runtime.release(replay)
        runtime.together(lambda rank: sides[rank.index].close())
