"""How a step is done, decided once for all ranks from what was measured of them.

Where ranks copy nothing has to lie in one byte range. Gathering a gradient costs as much memory
traffic as sending it, so what is large is sent ``direct``, from where autograd leaves it, and read
there by the optimizer's kernel, which adds what the peer has sent. The last bucket has nothing
beside it, so that over a link one kernel sends all of it, whatever its size. Through host memory,
where each copy costs the step from one device to the other, it is gathered and is one range.

Where ranks copy all weights change at the end: an update beside the backward costs its kernels more
than it saves (bench/results: VGG16-BN 53.97 ms instead of 53.62, a Transformer 7.33 instead of
7.27), and needs a meeting of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlow.errors import PlanError
from trlow.torch.fused import covers
from trlow.torch.measure import may_update_early

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trlow.torch.batches import BatchShape
    from trlow.torch.buckets import Bucket
    from trlow.torch.member import Member

DIRECT_NBYTES = 64 << 10  # of a gradient whose copy hides behind the backward


@dataclass(frozen=True, slots=True)
class Course:
    """What all ranks do alike."""

    copies: bool = False  # gradients are sent by copy engines
    fused: bool = False  # the optimizer's step is a kernel of trlow's
    adds: bool = False  # and adds the peer's gradients itself
    early: bool = False  # a weight changes as soon as its gradient is summed; not with copies
    direct: frozenset[str] = frozenset()  # parameters whose gradients are not gathered
    draws: bool = False  # random numbers

    def __post_init__(self) -> None:
        """Refuse what no program is made for: an early update reads no inbox."""
        if self.early and self.copies:
            raise PlanError("where ranks copy no weight changes early")


def course_on_gpus(
    members: Sequence[Member],
    shape: BatchShape,
    shard: list[torch.Tensor],
    buckets: Sequence[Bucket],
    *,
    transport: str | None,
    widens: bool,
) -> Course:
    """The course of members whose step was measured; ``shard`` is a batch of the first one.

    ``transport``: how ranks copy, if they do. ``widens``: gradients are reduced in another dtype
    than the optimizer's.
    """
    copies = transport is not None
    fused = all(is_covered(member) for member in members)
    # Clipping and a loss scale need all gradients, summed, before the first weight changes.
    alone = fused and not members[0].scales
    adds = alone and not widens
    early = alone and not copies and may_update_early(members[0], shape, shard)
    direct = frozenset[str]()
    if copies and adds and members[0].work.accumulate == 1:
        direct = _direct(members, buckets, pushed=transport == "peer")
    draws = any(member.draws for member in members)
    return Course(copies, fused, adds, early, direct, draws)


def is_covered(member: Member) -> bool:
    """Whether the kernel takes the step of gradients that lie as their parameters do."""
    itself: dict[torch.Tensor, torch.Tensor] = {p: p for p in member.trainable.values()}
    return covers(member.update.optimizer, itself)


def _direct(
    members: Sequence[Member], buckets: Sequence[Bucket], *, pushed: bool
) -> frozenset[str]:
    """Names that are not gathered. The last bucket is ``pushed`` by one kernel, or gathered."""
    names = set()
    for bucket in buckets:
        least: float = DIRECT_NBYTES
        if bucket is buckets[-1]:
            least = 0 if pushed else math.inf
        names |= {name for name in bucket.names if members[0].trainable[name].nbytes >= least}
    return frozenset(names).intersection(*(member.steady for member in members))
