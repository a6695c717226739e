"""From modules and an example batch to what is built: buckets, the course of a step, and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trlow.torch.buckets import DTYPES, Bucket, cut, make_plan
from trlow.torch.course import Course, course_on_gpus
from trlow.torch.measure import readiness

if TYPE_CHECKING:
    from collections.abc import Callable

    from trlow.dtype import DType
    from trlow.plan import MemoryPlan
    from trlow.torch.batches import BatchShape
    from trlow.torch.member import Member
    from trlow.torch.work import Wishes


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The same for all ranks."""

    plan: MemoryPlan
    buckets: tuple[Bucket, ...]
    course: Course
    wire: DType | None

    def move_in(self, member: Member, view: Callable[[str], torch.Tensor]) -> None:
        """A member into its arena; ``view(name)`` is a tensor of the plan, flat."""
        copies, direct = self.course.copies, self.course.direct
        member.adopt(view, self.buckets, self.wire, copies=copies, direct=direct)


def draw(
    members: list[Member],
    shape: BatchShape,
    shards: list[list[torch.Tensor]],
    wishes: Wishes,
    *,
    transport: str | None,
    on_host: bool,
) -> Blueprint:
    """Measure one step of each member, see `readiness`, and plan the steps to come.

    ``transport`` is the way of gradients that ranks copy, None where NCCL sums them.
    """
    copies = transport is not None
    order, together = readiness(members, shape, shards)
    known = {parameter.name: parameter for parameter in members[0].parameters()}
    ready = [known[name] for name in order]
    # To send them in parts gains nothing. What NCCL sums part by part is updated part by part.
    buckets = cut(ready, wishes.buckets, wishes.bucket_nbytes, together if copies else 1)
    wire = None if wishes.wire is None else DTYPES[wishes.wire]
    course = Course(copies)
    if not on_host:
        measured = members, shape, shards[0], buckets
        course = course_on_gpus(*measured, transport=transport, widens=wire is not None)
        torch.cuda.empty_cache()  # the graphs have a pool of their own
    given = tuple(known.values()), buckets, members[0].statistics(), wire
    plan = make_plan(*given, copies=copies, direct=course.direct)
    return Blueprint(plan, buckets, course, wire)
