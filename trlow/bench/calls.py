"""One collective as C calls with every argument converted: what the timed loop runs.

At small sizes the issuing thread is the limit, so the loop is a list that C walks through. A call
works at an offset that walks through the whole buffer, as nccl-tests' calls do, so that small sizes
are not measured in a cache alone.
`inside` stands in a group where one thread issues for all ranks or a rank needs two calls; `after`
follows the group.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trlow.bench.seat import SCALE_KERNELS

if TYPE_CHECKING:
    from trlow.bench.job import Job
    from trlow.bench.links import Links
    from trlow.bench.seat import Seat
    from trlow.binding.clib import Prepared


@dataclass(frozen=True, slots=True)
class RankCall:
    """One collective of one rank."""

    inside: tuple[Prepared, ...]
    after: tuple[Prepared, ...] = ()


def offset_of(job: Job, nbytes: int, call: int) -> int:
    """Where the call works: places of its size, over and over."""
    return call % max(1, job.most // nbytes) * nbytes


def addresses(job: Job, seat: Seat, count: int, place: str) -> tuple[int, int]:
    """(send, receive) at offset 0; in place NCCL wants the 1/N side inside of the other."""
    recv = seat.data("recv")
    if place == "out-of-place":
        return seat.data("send"), recv
    inner = recv + seat.rank * count * job.element.itemsize
    split = job.record.split
    return (inner if split == "send" else recv), (inner if split == "recv" else recv)


def rank_call(job: Job, links: Links, seat: Seat, nbytes: int, place: str, call: int) -> RankCall:
    """The `call`-th collective of `nbytes` bytes on one rank."""
    nccl, ranks = seat.platform.nccl, len(links.handles)
    count = job.record.count(nbytes, job.element.itemsize, ranks)
    offset = offset_of(job, nbytes, call)
    send, recv = (one + offset for one in addresses(job, seat, count, place))
    code, handle = job.element.nccl_code, links.handles[seat.rank]
    if job.collective == "sendrecv":
        following, before = (seat.rank + 1) % ranks, (seat.rank - 1) % ranks
        return RankCall(
            (
                nccl.prepare("ncclSend", send, count, code, following, handle, seat.stream),
                nccl.prepare("ncclRecv", recv, count, code, before, handle, seat.stream),
            )
        )
    middle = [links.reductions[seat.rank]] if job.record.reduces else []
    middle += [job.root] if job.record.rooted else []
    arguments: tuple[Any, ...] = (send, recv, count, code, *middle, handle, seat.stream)
    name = job.record.function
    if links.config is not None:
        name, arguments = f"{name}Config", (*arguments, byref(links.config))
    after: tuple[Prepared, ...] = ()
    if job.variant.mean == "sum_then_scale":
        values = (recv, seat.factor, count)
        after = (seat.kernels.prepare(SCALE_KERNELS[job.dtype], values, count, seat.stream),)
    return RankCall((nccl.prepare(name, *arguments),), after)


def lane_call(
    job: Job, links: Links, seats: tuple[Seat, ...], nbytes: int, place: str, call: int
) -> list[Prepared]:
    """One collective of all ranks that a thread issues: a group if that takes several calls."""
    calls = [rank_call(job, links, seat, nbytes, place, call) for seat in seats]
    inside = [step for one in calls for step in one.inside]
    steps = inside
    if len(inside) > 1 or job.collective == "sendrecv":
        nccl = seats[0].platform.nccl
        steps = [nccl.prepare("ncclGroupStart"), *inside, nccl.prepare("ncclGroupEnd")]
    for seat, one in zip(seats, calls, strict=True):
        if one.after and len(seats) > 1:
            steps = [*steps, seat.make_current()]
        steps = [*steps, *one.after]
    return steps
