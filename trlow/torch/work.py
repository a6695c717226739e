"""What a caller asks every rank to do in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Factory = Callable[[], torch.nn.Module]
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Work:
    """What every rank does in a step."""

    factory: Factory
    loss_fn: LossFunction
    optimizer: OptimizerFactory
    autocast: torch.dtype | None
    accumulate: int
    clip_norm: float | None
    world_size: int
