"""How to train: the optimizer's numbers and the learning rate of every step.

The host writes them into each step's input slot, by address; no graph holds one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trlow.errors import SettingsError
from trlow.nn.compiler import OPTIMIZERS
from trlow.range_op import MEAN_STRATEGIES

SCHEDULES = ("constant", "cosine")
REPLAY_MODES = ("fused", "staged")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate for each of `steps` steps.

    The first `warmup_steps` rise in a line to `lr`; then "constant" stays there and "cosine" falls
    along half a cosine, so that the step after the last one would have rate 0. Raises SettingsError
    for an unknown kind, a rate that is not finite or below 0, and counts that do not fit.
    """

    kind: str
    lr: float
    steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        check_rate("lr", self.lr)
        if self.kind not in SCHEDULES:
            raise SettingsError(f"schedule {self.kind!r}: known are {', '.join(SCHEDULES)}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise SettingsError(
                f"warm-up of {self.warmup_steps} steps: must lie in 0 to the {self.steps} steps "
                "that there are; shorten it or train longer"
            )

    def rate(self, step: int) -> float:
        """The learning rate of one step, counted from 0; past the last step it stays at the end."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        rest = self.steps - self.warmup_steps
        done = min(step - self.warmup_steps, rest)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * done / rest)) if rest else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train. Raises SettingsError for values that have no meaning.

    `weight_decay` is L2, on convolutions and fully connected weights alone; `warmup_epochs` count
    within the epochs of a fit; `mean_strategy` is that of `range_op.mean_all_reduce`, for every
    bucket.
    """

    lr: float = 0.2
    schedule: str = "cosine"
    warmup_epochs: int = 0
    optimizer: str = "momentum"
    momentum: float = 0.9
    weight_decay: float = 0.0
    replay: str = "fused"
    mean_strategy: str = "deferred"

    def __post_init__(self) -> None:
        """Check each value by itself."""
        Schedule(self.schedule, self.lr, 0)
        check_count("warmup_epochs", self.warmup_epochs, 0)
        check_rate("momentum", self.momentum, 1.0)
        check_rate("weight_decay", self.weight_decay)
        for name, value, known in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("replay", self.replay, REPLAY_MODES),
            ("mean_strategy", self.mean_strategy, MEAN_STRATEGIES),
        ):
            if value not in known:
                raise SettingsError(f"{name} {value!r}: known are {', '.join(known)}")


def check_rate(name: str, value: Any, limit: float = math.inf) -> None:
    """Raise SettingsError unless 0 <= value < limit and finite."""
    number = float(value) if type(value) in {int, float} else math.nan
    if not 0 <= number < limit:
        wanted = "finite and not negative" if limit == math.inf else f"in [0, {limit})"
        raise SettingsError(f"{name}={value!r} must be {wanted}")


def check_count(name: str, value: Any, least: int) -> None:
    """Raise SettingsError unless value is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise SettingsError(f"{name}={value!r} must be an integer of at least {least}")
