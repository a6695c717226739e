"""A rank's torch work on the host device: host functions on its streams.

A capture records them as nodes; a worker of the host device runs them in each replay, in the order
of streams and edges, where a GPU would run kernels. An exception cannot leave such a function: it
is kept, the work behind it is left out, and the next step of this rank raises it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from trlow.binding.cudart import cudaHostFn_t
from trlow.device import Events
from trlow.program import Stream
from trlow.torch.blame import blamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from trlow.enqueue import Rank
    from trlow.torch.batches import BatchShape
    from trlow.torch.member import Member
    from trlow.torch.payload import Payload


class HostSide:
    """The torch work of one rank, enqueued on streams of the host device."""

    overlaps = False  # backward is one function: buckets are ready at its end

    def __init__(self, rank: Rank, member: Member, shape: BatchShape) -> None:
        self._platform = rank.platform
        self.member = member
        self._shape = shape
        self._events = Events(rank.platform)
        self._error: BaseException | None = None
        self._todo: deque[Callable[[], None]] = deque()
        self._compute = self._function(self._forward_backward)
        self._apply = self._function(member.apply)
        self._next = self._function(self._load)

    def _function(self, work: Callable[[], None]) -> Any:
        """``work`` as C can call it; kept alive here for as long as a graph may hold it."""

        def run(_: object) -> None:
            if self._error is not None:
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001  it cannot pass through C
                blamed(error, self.member.module)
                error.add_note(f"on rank {self.member.rank}")
                self._error = error
                self.member.loss.fill_(math.nan)  # rather than that of the step before

        return cudaHostFn_t(run)

    def _forward_backward(self) -> None:
        member = self.member
        member.keep_loss(member.forward_backward(self._shape, member.inputs))
        for bucket in range(len(member.buckets)):
            member.gather(bucket)

    def _load(self) -> None:
        self._todo.popleft()()

    def _enqueue(self, stream: int, function: Any) -> None:
        self._platform.cudart.cudaLaunchHostFunc(stream, function, None)

    def compute(self, stream: int) -> None:
        """Forward, backward, and the gradients of every bucket in place."""
        self._enqueue(stream, self._compute)
        self._platform.cudart.cudaEventRecord(self._events["computed"], stream)

    def apply(self, stream: int) -> None:
        """The optimizer step. The warm-up has no other order than this event."""
        self._platform.cudart.cudaStreamWaitEvent(stream, self._events["computed"], 0)
        self._enqueue(stream, self._apply)

    def before(self, rank: Rank, payload: Payload) -> None:
        """The inputs of a step, in the order of the UPDATE stream. Raises a kept exception."""
        self.check()
        member, mine = self.member, payload.shards[rank.index]

        def load() -> None:
            for target, source in zip(member.inputs, mine, strict=True):
                target.copy_(source)
            if payload.rates is not None:
                member.update.set_rates(payload.rates)

        self._todo.append(load)
        self._enqueue(rank.streams[Stream.UPDATE], self._next)

    def check_history(self, state: dict[str, Any]) -> None:
        """Torch itself takes the step, from any state."""

    def settle(self) -> None:
        """Nothing is left to do after a capture."""

    def check(self) -> None:
        """Raise what a function raised, once."""
        if self._error is not None:
            error, self._error = self._error, None
            self._todo.clear()
            raise error

    def alone(self, rank: Rank, function: Callable[[], None]) -> None:
        """Run torch work outside of any step."""
        rank.streams.synchronize()
        function()

    def close(self) -> None:
        """Give its event back. On the rank's own thread."""
        self._events.close()
