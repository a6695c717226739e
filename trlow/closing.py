"""Giving everything back in order, whatever fails or interrupts it on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlow.errors import RankError, TrlowError
from trlow.ranks import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.ranks import Job, Ranks


class Closing:
    """Steps that each start jobs; the threads themselves end last.

    ``run`` goes on after a failure and raises the first. Interrupted (Ctrl-C), the next ``run``
    begins again with the step that was under way: giving something back twice does nothing.
    """

    def __init__(self, ranks: Ranks, steps: Sequence[Callable[[], Sequence[Job]]]) -> None:
        self._ranks = ranks
        self._steps = list(steps)
        self.begun = False

    def run(self) -> None:
        """Do what is left to do. Raises the first error when all is done."""
        self.begun = True
        errors: list[BaseException] = []
        while self._steps:
            jobs = self._steps[0]()
            if not self._ranks.settle(jobs):
                message = f"a release did not return within {GRACE_S:g} s"
                errors.append(RankError(message, rank=None, step=None, stage="close"))
            errors.extend(job.error for job in jobs if job.error is not None)
            del self._steps[0]
        if not self._ranks.stop():
            errors.append(TrlowError("a rank's thread did not end"))
        if errors:
            raise errors[0]
