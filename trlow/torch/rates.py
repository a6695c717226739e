"""Learning rates as torch's schedules set them: on an optimizer of the caller's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Rates:
    """One group for each parameter group of the real optimizers, without their parameters."""

    def __init__(self, rates: Sequence[float]) -> None:
        groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates]
        self.optimizer = torch.optim.SGD(groups, lr=rates[0])
        self._told: tuple[float, ...] = ()

    def now(self) -> tuple[float, ...]:
        """What the next step uses."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def set(self, rates: Sequence[float]) -> None:
        """Set every group's."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def forget(self) -> None:
        """Tell the devices again, whatever they know."""
        self._told = ()

    def changed(self) -> tuple[float, ...] | None:
        """What to tell the devices; None if they know.

        A schedule warns unless its optimizer has stepped before it; the step that asks is one.
        """
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        now = self.now()
        if now == self._told:
            return None
        self._told = now
        return now
