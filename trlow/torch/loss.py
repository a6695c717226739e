"""What a step gives back: its loss, for whoever wants to wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trlow.stepping import Result


class Loss:
    """The loss of one step, averaged over the ranks. Reading it waits for that step."""

    def __init__(self, result: Result, world_size: int) -> None:
        self._result, self._world_size = result, world_size

    def item(self) -> float:
        """The value. Raises what the step has come to, if it failed."""
        return float(self._result.values()[0]) / self._world_size

    __float__ = item

    def __repr__(self) -> str:
        return f"Loss(step {self._result.step})"
