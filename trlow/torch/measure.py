"""The order in which gradients become ready, measured by one step of each rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from trlow.errors import UsageError
from trlow.torch.blame import blamed

if TYPE_CHECKING:
    from trlow.torch.batches import BatchShape
    from trlow.torch.member import Member


def readiness(
    members: list[Member], shape: BatchShape, shards: list[list[torch.Tensor]]
) -> tuple[str, ...]:
    """Names of parameters in the order in which their gradients become ready, on every rank.

    One rank after another on the calling thread, with no collective anywhere, so whatever is
    compiled or searched for the first time can take its time. The optimizers make their state here,
    outside of the graphs' memory. Module and optimizer change; the caller puts them back. Raises
    ``UsageError`` where ranks differ.
    """
    for member, shard in zip(members, shards, strict=True):
        with ExitStack() as stack:
            if member.device.type == "cuda":
                side = torch.cuda.Stream(member.device)
                stack.enter_context(torch.cuda.stream(side))
            inputs = [leaf.to(member.device) for leaf in shard]
            try:
                member.forward_backward(shape, inputs)
                member.update.optimizer.step()
            except Exception as error:
                blamed(error, member.module)
                error.add_note(f"on rank {member.rank}")
                raise
            for parameter in member.trainable.values():
                parameter.grad = None
            del inputs
            if member.device.type == "cuda":
                side.synchronize()  # ends by itself: nothing on it waits for another rank
    for member in members[1:]:
        if member.order != members[0].order:
            pairs = zip(members[0].order, member.order, strict=True)
            first, other = next((a, b) for a, b in pairs if a != b)
            raise UsageError(
                f"gradients become ready in another order on rank {member.rank} ({other}) than on "
                f"rank 0 ({first}): a module's graph may not depend on its data or its rank"
            )
    if members[0].device.type == "cuda":
        torch.cuda.empty_cache()  # the graphs have a pool of their own
    return tuple(members[0].order)
