"""Rows as cells of the terminal's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trlow.bench.compare import Pair
from trlow.bench.result import Result, Row
from trlow.bench.sizes import short
from trlow.bench.winners import crossovers, winners

COLUMNS = (
    "size", "count", "requested", "place", "time µs", "p5", "median", "p95", "p99", "min", "cv %",
    "enqueue", "algbw", "busbw", "link bytes", "actual", "wrong", "fastest",
)  # fmt: skip
RIGHT = "rr  rrrrrrrrrrr r "
COMPARED = ("size", "variant", "place", "A µs", "B µs", "B/A", "95 %", "")
COMPARED_RIGHT = "r  rrrr "
LEGEND = (
    "times are µs per call by device events: time is the median over rounds of all calls between "
    "two events, the others are over iterations (graphs: over launches); enqueue is the issuing "
    "thread's; algbw and busbw in GB/s as nccl-tests has them; link bytes: what a ring would put "
    "on each rank's link"
)


@dataclass(frozen=True, slots=True)
class Table:
    """Title row, rows, and which columns hold numbers; a column with nothing in it is left out."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    right: str


def table_of(result: Result) -> Table:
    """Everything of a run, the fastest of each size marked, and where another one takes over."""
    marks: dict[int, str] = {}
    if len({row.variant for row in result.measured}) > 1:
        for place in {row.place for row in result.measured}:
            best = winners(result.measured, place)
            changes = {change.size for change in crossovers(best)}
            for size, row in best.items():
                marks[id(row)] = "crossover" if size in changes else "fastest"
    rows = [[*cells(row), marks.get(id(row), "")] for row in result.rows]
    shown = [index for index, _ in enumerate(COLUMNS) if any(row[index] for row in rows)]
    return Table(
        tuple(COLUMNS[index] for index in shown),
        [[row[index] for index in shown] for row in rows],
        "".join(RIGHT[index] for index in shown),
    )


def cells(row: Row) -> list[str]:
    """One row, without the last column."""
    head = [short(row.size), str(row.count), row.variant, row.place]
    if not row.measured:
        return [*head, "not available", *[""] * (len(COLUMNS) - 6)]
    spread = row.spread
    times = (row.time_us, spread.p5_us, spread.median_us, spread.p95_us, spread.p99_us)
    equivalent = "*" if row.ring_equivalent else ""
    actual = "" if row.actual is None else str(row.actual)
    return [
        *head,
        *(_us(value) for value in (*times, spread.least_us)),
        f"{100 * spread.cv:.1f}",
        "" if row.enqueue_us is None else _us(row.enqueue_us),
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}{equivalent}",
        f"{row.traffic_nbytes:.0f}",
        f"{actual} (not as forced)" if row.disagrees else actual,
        "" if row.wrong is None else str(row.wrong),
    ]


def remarks(result: Result) -> list[str]:
    """Lines below the table."""
    found = [LEGEND]
    if any(row.ring_equivalent for row in result.measured):
        found.append("* ring-equivalent: under NVLS switches add, so busbw is no link's speed")
    reasons: dict[str, str] = {}
    for row in result.rows:
        if not row.measured and row.reason:
            reasons.setdefault(row.variant, f"from {short(row.size)}: {row.reason}")
    found += [f"not available: {name}, {reason}" for name, reason in reasons.items()]
    for row in result.wrong:
        found.append(
            f"WRONG at {short(row.size)} {row.variant} {row.place}: {row.wrong} elements; "
            f"{'; '.join(row.named)}"
        )
    return found


def compared(pairs: Sequence[Pair]) -> list[list[str]]:
    """Rows of a comparison."""
    found = []
    for one in pairs:
        interval, marked = "", ""
        if one.ratio.low is not None and one.ratio.high is not None:
            interval = f"{one.ratio.low:.3f} - {one.ratio.high:.3f}"
            if one.ratio.beyond_noise:
                marked = "B slower" if one.ratio.value > 1 else "B faster"
        found.append(
            [
                short(one.first.size),
                one.second.variant,
                one.first.place,
                _us(one.first.time_us),
                _us(one.second.time_us),
                f"{one.ratio.value:.3f}",
                interval,
                marked,
            ]
        )
    return found


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}"
