"""Everything that one run found: rows as plain data, to and from JSON, and as CSV."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trlow.bench.collectives import COLLECTIVES
from trlow.bench.figures import GIGA, Spread, spread
from trlow.bench.tuning_log import Actual
from trlow.errors import SettingsError

FORMAT = 1  # of the JSON


@dataclass(slots=True)
class Row:
    """One size of one variant in one place."""

    variant: str
    algo: str | None
    proto: str | None
    size: int
    count: int
    place: str
    ranks: int
    factor: float  # busbw over algbw
    rounds_us: list[float] = field(default_factory=list)  # the time, once a round
    unit_us: list[float] = field(default_factory=list)  # over iterations or launches, all rounds
    enqueue_us: float | None = None
    wrong: int | None = None  # elements; None: not checked
    named: list[str] = field(default_factory=list)
    actual: Actual | None = None
    reason: str | None = None  # why it is not available

    @property
    def time_us(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds_us)

    @property
    def algbw(self) -> float:
        """GB/s of the size."""
        return self.size / (self.time_us * 1e-6) / GIGA

    @property
    def busbw(self) -> float:
        """GB/s on a rank's link, if data went around a ring."""
        return self.algbw * self.factor

    @property
    def ring_equivalent(self) -> bool:
        """Whether switches did the adding, so that busbw is no link's speed."""
        taken = self.actual.algorithm if self.actual is not None else self.algo
        return (taken or "").startswith("NVLS")

    @property
    def traffic_nbytes(self) -> float:
        """Bytes that a ring would put on each rank's link; a single rank has none."""
        return self.factor * self.size if self.ranks > 1 else 0.0

    @property
    def spread(self) -> Spread:
        """Figures over iterations or launches."""
        return spread(self.unit_us)

    @property
    def measured(self) -> bool:
        """Whether there is a time."""
        return bool(self.rounds_us)

    @property
    def disagrees(self) -> bool:
        """Whether NCCL took something else than was forced."""
        return self.actual is not None and not self.actual.agrees(self.algo, self.proto)

    def plain(self) -> dict[str, Any]:
        """As JSON has it: what was measured and what follows from it."""
        found = asdict(self)
        if not self.measured:
            return found
        return found | {
            "time_us": self.time_us,
            **asdict(self.spread),
            "algbw_gbps": self.algbw,
            "busbw_gbps": self.busbw,
            "ring_equivalent": self.ring_equivalent,
            "traffic_nbytes": self.traffic_nbytes,
            "disagrees": self.disagrees,
        }


@dataclass(slots=True)
class Result:
    """One run, whole or cut short."""

    header: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    failed: bool = False  # something hung or died, so that the exit code is 1

    @property
    def measured(self) -> list[Row]:
        """Rows with a time."""
        return [row for row in self.rows if row.measured]

    @property
    def wrong(self) -> list[Row]:
        """Rows with wrong elements."""
        return [row for row in self.rows if row.wrong]

    def to_json(self) -> str:
        """The file of `--json`."""
        whole = {
            "trlow_bench": FORMAT,
            "complete": self.complete,
            "failed": self.failed,
            "notes": self.notes,
            "request": self.request,
            "header": self.header,
            "rows": [row.plain() for row in self.rows],
        }
        return json.dumps(whole, indent=1) + "\n"

    def to_csv(self) -> str:
        """The file of `--csv`: a line per row, without single samples."""
        left_out = ("rounds_us", "unit_us", "named", "actual")
        rows = []
        for row in self.rows:
            cells = {key: value for key, value in row.plain().items() if key not in left_out}
            cells["actual"] = "" if row.actual is None else str(row.actual)
            rows.append(cells)
        names = list(dict.fromkeys(name for cells in rows for name in cells))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()


def read(path: Path) -> Result:
    """A result of `--json`, or nccl-tests' own JSON (-J). Raises SettingsError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is no JSON: {error}") from error
    try:
        if "trlow_bench" in found:
            return _own(found)
        theirs = Result(
            header={"tool": "nccl-tests"}, rows=_nccl_tests(found["results"]), complete=True
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"{path} is neither a result of trlow bench nor nccl-tests' JSON: {error!r}"
        ) from error
    if not theirs.rows:
        raise SettingsError(f"{path} holds no time of nccl-tests")
    return theirs


def _own(found: dict[str, Any]) -> Result:
    rows = []
    for cells in found["rows"]:
        kept = {name: cells[name] for name in Row.__dataclass_fields__}
        kept["actual"] = Actual(**kept["actual"]) if kept["actual"] else None
        rows.append(Row(**kept))
    return Result(
        found["header"], found["request"], rows, found["notes"], found["complete"], found["failed"]
    )


def _nccl_tests(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of one time each, or of one time per iteration where it was asked for (-I)."""
    rows = []
    for line in lines:
        for place, key in (("out-of-place", "out_of_place"), ("in-place", "in_place")):
            cells = line.get(key)
            if cells is None or not cells["time"]:
                continue
            factor = cells["bus_bw"] / cells["alg_bw"] if cells["alg_bw"] else 0.0
            row = Row(
                "nccl-tests", None, None, int(line["size"]), int(line["count"]), place, 0, factor
            )
            row.rounds_us = [float(cells["time"])]
            row.unit_us = (line.get(f"{key}_per_iter") or {}).get("times_us") or row.rounds_us
            row.wrong = None if cells["nwrong"] is None else int(cells["nwrong"])
            rows.append(row)
    return rows


def row_of(collective: str, ranks: int, size: int, count: int, place: str) -> Row:
    """An empty row."""
    factor = COLLECTIVES[collective].factor(ranks)
    return Row("", None, None, size, count, place, ranks, factor)
