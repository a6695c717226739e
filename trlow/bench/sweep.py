"""One run: a worker per variant, all of them asked in turn, size by size and round by round.

So drift hits all variants alike. A variant that NCCL refuses, or whose worker hangs or dies, is out
from there on; the others go on, and whatever was measured stays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trlow.bench import tuning_log
from trlow.bench.facts import Machine
from trlow.bench.job import Job
from trlow.bench.process import WorkerError, WorkerProcess, start
from trlow.bench.request import Request
from trlow.bench.result import Result, Row, row_of
from trlow.bench.sizes import short
from trlow.bench.variant import Variant
from trlow.settings import variables_in_effect

Start = Callable[[Job, Mapping[str, str]], WorkerProcess]
OPEN_S = 120.0  # making communicators may take longer than a step, with many workers at once


@dataclass(slots=True, eq=False)
class Member:
    """A variant and its worker; without one it is out, for `reason`."""

    variant: Variant
    worker: WorkerProcess | None = None
    reason: str | None = None


class Sweep:
    """Runs a request. `result` holds what is there at any moment, also after an exception."""

    def __init__(
        self,
        request: Request,
        *,
        tell: Callable[[str], None] = lambda _: None,
        keep: Callable[[Result], None] = lambda _: None,
        start_worker: Start = start,
    ) -> None:
        """`tell` shows progress, `keep` is called with the result after every size."""
        self.request = request
        self.result = Result(request=_plain(request))
        self._tell = tell
        self._keep = keep
        self._start = start_worker
        self._members = [Member(variant) for variant in request.variants]
        self._ranks = 0
        self._machine: Machine | None = None

    def run(self) -> Result:
        """Measure everything. Raises UsageError before anything is allocated."""
        try:
            self._begin()
            for number, size in enumerate(self.request.sizes):
                self._size(number, size)
                self._keep(self.result)
            if self._machine is not None:
                self.result.header["after"] = self._machine.state()
            for member in self._members:
                self._close(member)
            if self._has_log():
                self._read_logs()
            self.result.complete = not self.result.failed
        finally:
            for member in self._members:
                if member.worker is not None:
                    member.worker.kill()
                    member.worker = None
        return self.result

    # -- begin

    def _begin(self) -> None:
        """A probe tells what machine this is; then workers say hello, then they allocate."""
        self._tell("starting")
        header = self._probe()
        self._ranks = int(header["ranks"])
        self.request.check_ranks(self._ranks)
        for member in self._members:
            member.reason = member.variant.refused(self.request.record, variables_in_effect())
            if member.reason is None:
                member.worker = self._launch(member.variant, {})
        for step in ("hello", "open"):
            self._all(self._members, step)

    def _probe(self) -> dict[str, Any]:
        """The head of the result, by a worker that forces nothing."""
        job = self.request.job(self.request.variants[0])
        worker = self._start(replace(job, variant=Variant()), {})
        try:
            hello = worker.ask(OPEN_S, "hello")
        finally:
            worker.kill()
        self._machine = Machine(hello)
        header = self._machine.header()
        self.result.header = header | {
            "nccl_version": hello["nccl_version"],
            "before": self._machine.state(),
        }
        return header

    def _launch(self, variant: Variant, more: Mapping[str, str]) -> WorkerProcess:
        by_call = variant.selection(self.result.header["nccl_version"]) is not None
        variables = variant.environment(by_call=by_call) | dict(more)
        return self._start(self.request.job(variant), variables)

    def _all(self, members: Sequence[Member], step: str) -> None:
        """Ask several at once, since starting takes seconds."""
        for member in members:
            self._guard(member, lambda worker: worker.send(step))
        for member in members:
            self._guard(member, lambda worker: worker.receive(OPEN_S))

    def _guard(self, member: Member, ask: Callable[[WorkerProcess], Any]) -> Any:
        """What `ask` returns, or None where the member is out, or goes out by it."""
        if member.worker is None:
            return None
        try:
            return ask(member.worker)
        except WorkerError as error:
            self._out(member, str(error))
            if error.hung or error.died:
                self.result.failed = True
            return None

    def _out(self, member: Member, reason: str) -> None:
        member.reason = " ".join(reason.split())
        if member.worker is not None:
            member.worker.kill()
        member.worker = None
        self.result.notes.append(f"{member.variant.name}: {member.reason}")

    # -- measuring

    def _size(self, number: int, size: int) -> None:
        request = self.request
        rows = {
            (member, place): self._row(member, size, place)
            for member in self._members
            for place in request.places
        }
        for turn in range(request.rounds):
            for (member, place), row in rows.items():
                self._tell(
                    f"{request.collective} {short(size)} ({number + 1} of {len(request.sizes)}), "
                    f"round {turn + 1} of {request.rounds}: {member.variant.name} {place}"
                )
                self._measure(member, row, checked=turn == 0)
        for (member, _), row in rows.items():
            if not row.measured:
                row.reason = member.reason

    def _row(self, member: Member, size: int, place: str) -> Row:
        """Placed in the result at once, so that Ctrl-C keeps it."""
        count = self.request.count(size, self._ranks)
        row = row_of(self.request.collective, self._ranks, size, count, place)
        row.variant, row.reason = member.variant.name, member.reason
        row.algo, row.proto = member.variant.algo, member.variant.proto
        self.result.rows.append(row)
        return row

    def _measure(self, member: Member, row: Row, *, checked: bool) -> None:
        request = self.request
        limit = request.deadline_s
        found = self._guard(
            member, lambda worker: worker.ask(limit, "measure", size=row.size, place=row.place)
        )
        if found is None:
            return
        row.rounds_us.append(found["time_us"])
        row.unit_us += found["unit_us"]
        before = row.enqueue_us
        row.enqueue_us = min(found["enqueue_us"], before or found["enqueue_us"])
        for _ in range(request.checks if checked else 0):
            found = self._guard(
                member, lambda worker: worker.ask(limit, "check", size=row.size, place=row.place)
            )
            if found is not None:
                row.wrong = (row.wrong or 0) + found["wrong"]
                row.named += found["named"]

    def _close(self, member: Member) -> None:
        def close(worker: WorkerProcess) -> None:
            worker.close(self.request.deadline_s)

        self._guard(member, close)
        member.worker = None

    # -- what NCCL really took

    def _has_log(self) -> bool:
        """Whether it is asked for and NCCL would say: not on the host device, nor of send."""
        real = self.result.header["platform"] != "host" and self._ranks > 1
        return self.request.actual and real and self.request.collective != "sendrecv"

    def _read_logs(self) -> None:
        """A fresh, untimed process per variant that was measured, one call per size, with a log."""
        with tempfile.TemporaryDirectory() as folder:
            names = {row.variant for row in self.result.measured}
            chosen = [m for m in self._members if m.variant.name in names]
            members = [Member(member.variant) for member in chosen]
            logs = [Path(folder, f"{index}.log") for index in range(len(members))]
            self._tell("reading NCCL's log")
            try:
                for member, log in zip(members, logs, strict=True):
                    more = tuning_log.VARIABLES | {"NCCL_DEBUG_FILE": str(log)}
                    member.worker = self._launch(member.variant, more)
                for step in ("hello", "open"):
                    self._all(members, step)
                for member, log in zip(members, logs, strict=True):
                    self._read_log(member, log)
            finally:
                for member in members:
                    if member.worker is not None:
                        member.worker.kill()

    def _read_log(self, member: Member, log: Path) -> None:
        rows = [row for row in self.result.measured if row.variant == member.variant.name]
        limit = self.request.deadline_s
        for row in rows:
            ask = partial(_call, limit, row.size, row.place)
            self._guard(member, ask)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        taken = tuning_log.read(text, self.request.record.log_name)
        itemsize = self.request.job(member.variant).element.itemsize
        for row in rows:
            row.actual = taken.get(row.count * itemsize)


def _call(limit: float, size: int, place: str, worker: WorkerProcess) -> Any:
    return worker.ask(limit, "call", size=size, place=place)


def _plain(request: Request) -> dict[str, Any]:
    return {**asdict(request), "settings": dict(request.settings)}
