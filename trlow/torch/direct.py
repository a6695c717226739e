"""Gradients that are sent from where autograd leaves them, and read there by the optimizer.

Where ranks copy nothing has to lie in one byte range. Gathering a gradient costs as much memory
traffic as sending it, so only what is small is gathered, for the sake of few copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlow.torch.fused import covers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trlow.torch.buckets import Bucket
    from trlow.torch.member import Member

DIRECT_NBYTES = 64 << 10
LAST_NBYTES = 1 << 20  # in the last bucket, whose copies hide behind nothing


def direct_names(members: Sequence[Member], buckets: Sequence[Bucket]) -> frozenset[str]:
    """Parameters whose gradients are sent directly, in a module whose step was measured."""
    if not all(_may_be_direct(member) for member in members):
        return frozenset()
    names = set()
    for bucket in buckets:
        least = LAST_NBYTES if bucket is buckets[-1] else DIRECT_NBYTES
        names |= {name for name in bucket.names if members[0].trainable[name].nbytes >= least}
    return frozenset(names).intersection(*(member.steady for member in members))


def _may_be_direct(member: Member) -> bool:
    """Whether nobody but the kernel of the optimizer's step reads the gradients."""
    itself: dict[torch.Tensor, torch.Tensor] = {p: p for p in member.trainable.values()}
    alone = not member.scales and member.work.accumulate == 1
    return alone and covers(member.update.optimizer, itself)
