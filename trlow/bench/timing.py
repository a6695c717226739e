"""Times by device events, eager or by graphs, each in two passes.

The first pass has one event before and one behind all units, so nothing stands between two calls:
that is the time, as nccl-tests means it. The second has an event behind each unit, for percentiles;
eager, these events cost the host a little, so its median may lie above the time. A unit is an eager
call, or one launch of a graph of `iterations` calls. Warm-ups run right before the first event: the
ranks leave the last of them together, so a late thread does not count, and neither does the time
that a device idles before its first launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from ctypes import byref, c_longlong, c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from trlow.bench.calls import lane_call
from trlow.bench.exact import Exact, Segment
from trlow.bench.seat import Seat
from trlow.recording import PlainRecorder

if TYPE_CHECKING:
    from trlow.bench.crew import Crew, Lane
    from trlow.binding.calls import CallList
    from trlow.binding.clib import Prepared

RESOLUTION_US = 0.5  # cudaEventElapsedTime's; one rank in place does nothing at all


@dataclass(frozen=True, slots=True)
class Times:
    """One measurement, in µs per collective, averaged over ranks."""

    time_us: float
    unit_us: tuple[float, ...]
    enqueue_us: float  # what the issuing thread spends on one collective of its ranks


def measure(crew: Crew, nbytes: int, place: str) -> Times:
    """Time one size. Raises RankError, ForeignError."""
    job = crew.job
    fill(crew)
    if job.launches:
        capture(crew, nbytes, place, job.iterations)
    units = {lane: _units(crew, lane, nbytes, place) for lane in crew.lanes}
    calls = job.calls_per_unit
    # Made before any thread begins: one that still made its own would keep the others waiting.
    wholes = {lane: _loop(crew, lane, units[lane], each=False) for lane in crew.lanes}
    whole = crew.on_lanes(lambda lane: _pass(lane, wholes[lane]))
    spreads = {lane: _loop(crew, lane, units[lane], each=True) for lane in crew.lanes}
    spread = crew.on_lanes(lambda lane: _pass(lane, spreads[lane]))
    totals = [max(total, RESOLUTION_US) for _, found in whole for (total,) in found]
    rows = [row for _, found in spread for row in found]
    return Times(
        statistics.fmean(totals) / (job.units * calls),
        tuple(statistics.fmean(column) / calls for column in zip(*rows, strict=True)),
        statistics.fmean(seconds for seconds, _ in whole) * 1e6 / (job.units * calls),
    )


def call_once(crew: Crew, nbytes: int, place: str) -> None:
    """One collective as the timed loop makes it, and a wait."""
    if crew.job.launches:
        capture(crew, nbytes, place, 1)
        key = (nbytes, place, 1)
        loops = {lane: lane.of_each(lambda seat: seat.launch(key)) for lane in crew.lanes}
    else:
        loops = {lane: _lane_call(crew, lane, nbytes, place, 0) for lane in crew.lanes}
    _run_and_wait(crew, loops)


def warm(crew: Crew, nbytes: int, place: str) -> None:
    """One eager collective of a size, so that nothing is a first use in a capture."""
    _run_and_wait(crew, {lane: _lane_call(crew, lane, nbytes, place, 0) for lane in crew.lanes})


def fill(crew: Crew) -> None:
    """Numbers everywhere that a call may read: zeros would be faster than data."""
    job = crew.job
    exact = Exact(job.record, job.element, job.result_op, job.root, len(crew.ranks))
    count = job.most // job.element.itemsize

    def write(seat: Seat) -> None:
        segment = Segment(0, count, exact.inputs[seat.rank])
        for name in seat.bases:
            seat.fill(seat.data(name), segment)
        seat.synchronize()

    crew.on_ranks(write)


def capture(crew: Crew, nbytes: int, place: str, calls: int) -> None:
    """Capture `calls` collectives on every lane, then instantiate and upload on every lane."""
    key = (nbytes, place, calls)
    if key in crew.seats[0].graphs:
        return
    warm(crew, nbytes, place)
    steps = {lane: _calls(crew, lane, nbytes, place, calls) for lane in crew.lanes}
    captured = crew.on_lanes(lambda lane: _capture(lane, steps[lane]))
    graphs = dict(zip(crew.lanes, captured, strict=True))
    crew.on_lanes(lambda lane: _instantiate(lane, key, graphs[lane]))


def _calls(crew: Crew, lane: Lane, nbytes: int, place: str, calls: int) -> CallList:
    every = (_lane_call(crew, lane, nbytes, place, call) for call in range(calls))
    return crew.platform.call_list(list(chain.from_iterable(every)))


def _lane_call(crew: Crew, lane: Lane, nbytes: int, place: str, call: int) -> list[Prepared]:
    return lane_call(crew.job, crew.links, lane.seats, nbytes, place, call)


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of a lane: its calls, the clock around the timed ones, and how many events."""

    calls: CallList
    clocks: tuple[c_longlong, c_longlong]
    events: int


def _units(
    crew: Crew, lane: Lane, nbytes: int, place: str
) -> tuple[list[list[Prepared]], list[list[Prepared]]]:
    """Warm-ups and timed units."""
    job = crew.job
    if job.launches:
        once = lane.of_each(lambda seat: seat.launch((nbytes, place, job.iterations)))
        return [once] * job.warmups, [once] * job.launches
    every = [_lane_call(crew, lane, nbytes, place, call) for call in range(job.iterations)]
    warmups = [every[index % len(every)] for index in range(job.warmups)]
    return warmups, every


def _loop(
    crew: Crew, lane: Lane, units: tuple[list[list[Prepared]], list[list[Prepared]]], *, each: bool
) -> Loop:
    """The timed units with events around them all, or with one behind each."""
    platform, clocks = crew.platform, (c_longlong(), c_longlong())
    first, *ends = (
        lane.of_each(partial(Seat.record, index=index)) for index in range(crew.job.units + 1)
    )
    warmups, timed = units
    if each:
        inside, after = [call for pair in zip(timed, ends, strict=True) for call in pair], []
    else:
        inside, after = timed, ends[0]
    begin, end = map(platform.clock, clocks)
    calls = [*chain(*warmups), *first, begin, *chain(*inside), end, *after]
    return Loop(platform.call_list(calls), clocks, len(ends) + 1 if each else 2)


def _pass(lane: Lane, loop: Loop) -> tuple[float, list[list[float]]]:
    """Seconds of the timed calls on the host, and per rank the µs between events."""
    loop.calls()
    lane.synchronize()
    begun, ended = (clock.value for clock in loop.clocks)
    return (ended - begun) / 1e9, [
        [seat.elapsed_us(*pair) for pair in pairwise(range(loop.events))] for seat in lane.seats
    ]


def _run_and_wait(crew: Crew, calls: Mapping[Lane, list[Prepared]]) -> None:
    lists = {lane: crew.platform.call_list(calls[lane]) for lane in crew.lanes}

    def wait(lane: Lane) -> None:
        lists[lane]()
        lane.synchronize()

    crew.on_lanes(wait)


def _capture(lane: Lane, calls: CallList) -> list[int]:
    """Begin on every rank, enqueue, end on every rank; the graphs in rank order."""
    recorder = PlainRecorder(lane.seats[0].platform)
    for seat in lane.seats:
        lane.current(seat)
        recorder.begin(seat.stream)
    calls()
    found = []
    for seat in lane.seats:
        lane.current(seat)
        found.append(recorder.end(seat.stream).graph)
    return found


def _instantiate(lane: Lane, key: object, graphs: Sequence[int]) -> None:
    for seat, graph in zip(lane.seats, graphs, strict=True):
        lane.current(seat)
        executable = c_void_p()
        seat.platform.cudart.cudaGraphInstantiate(byref(executable), graph, 0)
        seat.graphs[key] = (graph, executable.value or 0)
        seat.platform.cudart.cudaGraphUpload(executable.value, seat.stream)
        seat.synchronize()
