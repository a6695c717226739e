"""What a caller asks every rank to do in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trlow.errors import UsageError

Factory = Callable[[], torch.nn.Module]
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
AUTOCASTS = WIRES = (None, torch.bfloat16, torch.float16)
STATISTICS = ("mean", "rank0")  # what ranks do with running batch-norm statistics


@dataclass(frozen=True, slots=True)
class Work:
    """What every rank does in a step. Raises ``UsageError`` for what cannot be done."""

    factory: Factory
    loss_fn: LossFunction
    optimizer: OptimizerFactory
    autocast: torch.dtype | None
    accumulate: int
    clip_norm: float | None
    world_size: int

    def __post_init__(self) -> None:
        """Refuse values without a meaning, whatever their type."""
        check_choice("autocast", self.autocast, AUTOCASTS)
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise UsageError(f"accumulate must be an int of at least 1, not {self.accumulate!r}")
        norm: object = self.clip_norm
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise UsageError(f"clip_norm must be a number above 0, not {norm!r}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """How gradients travel, as the caller asked. Raises ``UsageError`` for unknown words."""

    buckets: int | Sequence[Sequence[str]] | None
    bucket_nbytes: int
    wire: torch.dtype | None
    statistics: str

    def __post_init__(self) -> None:
        """Refuse what is none of the choices."""
        check_choice("wire", self.wire, WIRES)
        check_choice("statistics", self.statistics, STATISTICS)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ``UsageError`` with all choices for another value."""
    if value not in choices:
        raise UsageError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")
