"""Memory of an arena as torch tensors, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    import torch

    from trlow.arena import Arena
    from trlow.plan import Range


def tensor_of(arena: Arena, what: str | Range) -> torch.Tensor:
    """A DTensor in its shape, or a region or range flat, as a tensor of the arena's device.

    Through DLPack, without a copy. Valid until the runtime is closed; to be read and written only
    while no step runs. Raises ``PlanError`` for an unknown name.
    """
    return from_dlpack(arena.array(what))
