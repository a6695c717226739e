"""Is every element what it must be, and did nothing write beside the buffer?

A check is apart from the timing: one collective on fresh data at offset 0, eager and, where graphs
are timed, by a graph of one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trlow.bench.calls import addresses
from trlow.bench.exact import PERIOD, Exact, decode
from trlow.bench.seat import STAGING_NBYTES
from trlow.bench.timing import call_once, warm

if TYPE_CHECKING:
    from trlow.bench.crew import Crew
    from trlow.bench.exact import Segment
    from trlow.bench.seat import Seat

NAMED = 3  # wrong elements that are told of each rank


@dataclass(frozen=True, slots=True)
class Wrong:
    """One element that is not what it must be; a canary's index is in bytes and may be negative."""

    rank: int
    index: int
    expected: float | str
    got: float | str

    def __str__(self) -> str:
        return f"rank {self.rank}, index {self.index}: expected {self.expected}, got {self.got}"


def check(crew: Crew, nbytes: int, place: str) -> tuple[int, list[Wrong]]:
    """How many elements are wrong over all ranks, and the first of each."""
    job = crew.job
    exact = Exact(job.record, job.element, job.result_op, job.root, len(crew.ranks))
    count = job.record.count(nbytes, job.element.itemsize, len(crew.ranks))
    total, named = 0, []
    for way in (warm, call_once) if job.launches else (call_once,):
        if way is call_once and job.launches:
            call_once(crew, nbytes, place)  # captured before the data is written
        crew.on_ranks(lambda seat: _write(crew, exact, seat, nbytes, count, place))
        way(crew, nbytes, place)
        for number, found in crew.on_ranks(
            lambda seat: _read(crew, exact, seat, nbytes, count, place)
        ):
            total += number
            named += found
    return total, named


def _write(crew: Crew, exact: Exact, seat: Seat, nbytes: int, count: int, place: str) -> None:
    send, _ = addresses(crew.job, seat, count, place)
    for name, used in _used(crew, nbytes, count, place).items():
        seat.platform.cudart.cudaMemsetAsync(seat.data(name), 0xFF, used, seat.stream)
        seat.set_guards(name, used)
    seat.fill(send, exact.sent(seat.rank, count))
    seat.synchronize()


def _read(
    crew: Crew, exact: Exact, seat: Seat, nbytes: int, count: int, place: str
) -> tuple[int, list[Wrong]]:
    job, wrong = crew.job, 0
    named: list[Wrong] = []
    send, recv = addresses(job, seat, count, place)
    for segment in exact.received(seat.rank, count):
        for index, expected, got in _differences(seat, recv, segment):
            wrong += 1
            if len(named) < NAMED:
                pair = (decode(expected, job.element), decode(got, job.element))
                named.append(Wrong(seat.rank, index, *pair))
    if place == "out-of-place":  # an input is read, never written
        for index, expected, got in _differences(seat, send, exact.sent(seat.rank, count)):
            wrong += 1
            if len(named) < NAMED:
                pair = (decode(expected, job.element), decode(got, job.element))
                named.append(Wrong(seat.rank, index, f"the input {pair[0]}", pair[1]))
    for name, used in _used(crew, nbytes, count, place).items():
        for at, got_byte in seat.guards(name, used):
            wrong += 1
            named.append(
                Wrong(seat.rank, at, f"an untouched guard byte beside {name}", f"{got_byte:#x}")
            )
    return wrong, named


def _used(crew: Crew, nbytes: int, count: int, place: str) -> dict[str, int]:
    """Bytes of each buffer that the collective may touch; its guard stands right behind."""
    if place == "in-place":
        return {"recv": nbytes}
    counts = crew.job.record.counts(count, len(crew.ranks))
    itemsize = crew.job.element.itemsize
    return {name: n * itemsize for name, n in zip(("send", "recv"), counts, strict=True)}


def _differences(
    seat: Seat, address: int, segment: Segment
) -> Iterator[tuple[int, np.generic, np.generic]]:
    """(index in the buffer, expected, got) of every element that differs."""
    size = segment.block.itemsize
    step = STAGING_NBYTES // (PERIOD * size) * PERIOD  # whole periods: every part is the same
    part = segment.part(0, min(step, segment.count))
    for first in range(0, segment.count, step):
        expected = part[: min(step, segment.count - first)]
        start = segment.start + first
        got = seat.download(address + start * size, expected.size, segment.block)
        differ = got.view(f"u{size}") != expected.view(f"u{size}")
        for at in np.flatnonzero(differ):
            yield start + int(at), expected[at], got[at]
