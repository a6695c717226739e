"""The loop: one thread per rank that only launches graphs, and what it may call while it does."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from trlow.binding.clib import counting
from trlow.errors import RankError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trlow.capture import Graphs
    from trlow.enqueue import Rank
    from trlow.launching import Fill, RankReplay
    from trlow.program import Program

# Team.together: runs a function on every rank's thread, returns the results in rank order
Together: TypeAlias = "Callable[..., list[Any]]"

# What the binding floor may see of a rank's thread between two steps.
ALLOWED_CALLS = frozenset(
    {
        "cudaGraphLaunch",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaStreamWaitEvent",
        "trlowHostIssuerEnter",
        "trlowHostIssuerLeave",
    }
)
DRAINS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


def check_steps(steps: int) -> None:
    """Raise ``UsageError`` for a number of steps that cannot be run."""
    if type(steps) is not int or steps < 0:
        message = f"steps must be an int and not negative, got {steps!r}"
        raise UsageError(message)


@dataclass(slots=True)
class CallCount:
    """What the binding floor saw of the replay loop, over all runs so far."""

    steps: int = 0
    ranks: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, steps: int, counted: Mapping[tuple[int, str], int], threads: set[int]) -> None:
        """Take one run's counts of the rank threads. Raises ``RankError`` for a call not allowed.

        Prologue and the wait for the last step are outside of the loop and were not counted.
        """
        self.steps += steps
        self.ranks = len(threads)
        for (thread, name), number in counted.items():
            if thread not in threads:
                continue
            self.calls[name] += number
            if name not in ALLOWED_CALLS and name not in DRAINS:
                message = f"the replay loop called {name} {number} times"
                raise RankError(message, rank=None, step=None, stage="audit")

    def per_step(self, *names: str) -> float:
        """Calls of ``names`` per rank and step."""
        total = sum(self.calls[name] for name in names)
        return total / (self.steps * self.ranks) if self.steps else 0.0


class Replay:
    """A captured program. ``run`` replays it; the runtime that captured it closes it.

    ``calls`` holds what the binding floor saw of the loop in every run with ``audit``.
    """

    def __init__(
        self, program: Program, mode: str, prepared: Sequence[RankReplay], together: Together
    ) -> None:
        """``together`` runs a function on every rank's thread (``Team.together``)."""
        self.program = program
        self.mode = mode
        self.calls = CallCount()
        self._prepared = tuple(prepared)
        self._together: Together | None = together

    def __len__(self) -> int:
        """The number of ranks."""
        return len(self._prepared)

    def prepared(self, rank: int) -> RankReplay:
        """What ``rank`` launches."""
        return self._prepared[rank]

    def together(self, function: Callable[[Rank], Any], **how: Any) -> list[Any]:
        """``Team.together``. Raises ``UsageError`` for a replay that is closed."""
        return self._open()(function, **how)

    def _open(self) -> Together:
        if self._together is None:
            message = f"the replay of {self.program.name!r} is closed; capture the program again"
            raise UsageError(message)
        return self._together

    @property
    def graphs_per_rank(self) -> int:
        """How many distinct executable graphs one rank launches."""
        return len({item.executable for phase in self._prepared[0].phases for item in phase})

    @property
    def first_graphs(self) -> Graphs:
        """What holds rank 0's graphs: the replay's own if fused, shared if staged."""
        return self._prepared[0].graphs

    @property
    def closed(self) -> bool:
        """Whether the graphs are gone, by ``close`` of the runtime or by a failure."""
        return self._together is None

    def run(
        self,
        steps: int,
        fill: Fill | None = None,
        *,
        first_step: int = 0,
        audit: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Replay ``steps`` steps on all ranks and return when every rank has finished them.

        ``fill(rank, step, slot)`` writes the inputs of a step; steps count from ``first_step`` and
        the first always takes phase 0. ``audit`` counts every C call of the loop and fails on one
        that does not belong there. ``progress(step)`` is called on the calling thread at most twice
        a second.

        Without ``fill`` a program with inputs runs on what its slots hold. Raises ``RankError``;
        after it all communicators are new and every replay of the runtime is closed.
        """
        check_steps(steps)
        together = self._open()
        prepared = self._prepared
        if fill is not None and not prepared[0].slots:
            message = f"{self.program.name!r} has no input to fill; it copies from no slot"
            raise UsageError(message)
        if steps and fill is not None:
            together(lambda rank: prepared[rank.index].prologue(fill, first_step))

        def loop(rank: Rank) -> int:
            prepared[rank.index].run(steps, fill, first_step)
            return threading.get_ident()

        if not audit:
            together(loop, launches=True, progress=progress)
            return
        with counting() as counted:
            threads = together(loop, launches=True, progress=progress)
        self.calls.add(steps, counted, set(threads))

    def detach(self) -> None:
        """Forget the graphs; their owner destroys them."""
        self._together = None
