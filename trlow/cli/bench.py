"""`trlow bench`: one collective over sizes and variants, and two results side by side.

Everything that can be wrong with the request is found before a worker allocates. Whatever was
measured is shown and written, also when a worker hung or Ctrl-C came.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trlow.bench import compare, facts, plot, result, table
from trlow.bench.exact import dtype_of
from trlow.bench.request import Request
from trlow.bench.result import Result
from trlow.bench.sizes import parse_size, sizes_between
from trlow.bench.sweep import Sweep
from trlow.bench.variant import (
    ALGORITHMS,
    BUFFERS,
    LAUNCHES,
    PROTOCOLS,
    Variant,
    choose,
    parse_ctas,
    variants_of,
)
from trlow.bench.winners import crossovers, winners
from trlow.cli.console import Console
from trlow.cli.given import given
from trlow.cli.output import check_writable, write
from trlow.errors import SettingsError
from trlow.range_op import MEAN_STRATEGIES
from trlow.settings import Settings, check_variables, variables_in_effect

EXIT_FAILED = 1
MOST, STEP = "32M", "1M"  # nccl-tests' -e and -i


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write."""

    json: Path | None
    csv: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raise SettingsError, before measuring, for a file that could not be written."""
        for name in ("json", "csv", "plot"):
            path = getattr(self, name)
            if path is not None:
                check_writable(f"--{name}", path)
        if self.plot is not None:
            plot.check_plot(self.plot)

    def keep(self, found: Result) -> None:
        """Write what is there; called after every size, so that nothing can lose it."""
        if self.json is not None:
            write("--json", self.json, found.to_json())
        if self.csv is not None:
            write("--csv", self.csv, found.to_csv())


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure one collective. Raises UsageError before anything is allocated."""
    request = request_of(arguments)
    outputs = outputs_of(arguments)
    outputs.check()
    sweep = Sweep(request, tell=console.status, keep=outputs.keep)
    try:
        found = sweep.run()
    finally:
        if sweep.result.rows:
            _finish(sweep.result, outputs, console)
    bad = found.failed or found.wrong or not found.measured
    return EXIT_FAILED if bad else 0


def outputs_of(arguments: argparse.Namespace) -> Outputs:
    """The files of the options."""
    given = [
        Path(getattr(arguments, name)) if name in arguments else None
        for name in ("json", "csv", "plot")
    ]
    return Outputs(*given)


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask for. Raises SettingsError."""
    element = dtype_of(arguments.dtype)
    least = parse_size("-b", arguments.least)
    most = parse_size("-e", arguments.most if "most" in arguments else MOST)
    most = most if "most" in arguments else max(least, most)
    if "factor" in arguments:
        sizes = sizes_between(least, most, arguments.factor, None)
    else:
        sizes = sizes_between(least, most, None, parse_size("-i", getattr(arguments, "step", STEP)))
    sendrecv = arguments.collective == "sendrecv"
    places = {"both": ("out-of-place", "in-place")}.get(
        arguments.place, (arguments.place or ("out-of-place" if sendrecv else "in-place"),)
    )
    return Request(
        collective=arguments.collective,
        sizes=sizes,
        dtype=element.name,
        op=getattr(arguments, "op", "sum"),
        root=getattr(arguments, "root", 0),
        iterations=arguments.iterations,
        warmups=arguments.warmups,
        launches=arguments.launches,
        checks=arguments.checks,
        rounds=arguments.rounds,
        places=places,
        variants=variants_from(arguments),
        actual=arguments.actual,
        deadline_s=arguments.deadline,
        settings=settings_from(arguments),
    )


def variants_from(arguments: argparse.Namespace) -> tuple[Variant, ...]:
    """Every combination of the lists that were given."""

    def items(name: str, known: Sequence[str]) -> list[str] | list[None]:
        text = getattr(arguments, name, None)
        return [None] if text is None else choose(f"--{name}", text, known)

    mixing = [None if word is None else word == "on" for word in items("mixing", ("on", "off"))]
    return variants_of(
        items("algo", tuple(ALGORITHMS)),
        items("proto", PROTOCOLS),
        choose("--buffers", arguments.buffers, BUFFERS),
        choose("--launch", arguments.launch, LAUNCHES),
        parse_ctas(arguments.ctas) if "ctas" in arguments else [None],
        mixing,
        items("mean", MEAN_STRATEGIES),
    )


def settings_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of Settings that the workers get; checked here once."""
    check_variables()
    chosen: dict[str, Any] = {
        "any_world_size": True,
        **given(arguments, "device", "gpus", "allow_unabortable"),
    }
    if not variables_in_effect().get("TRLOW_LOOPBACK_ONLY"):
        chosen["loopback_only"] = True  # all ranks are in one process, so nobody else connects
    Settings.from_environment(**chosen, deadline_s=arguments.deadline)
    return chosen


def _finish(found: Result, outputs: Outputs, console: Console) -> None:
    """Show and write, whole or cut short."""
    for line in facts.lines(found.header):
        console.line(line)
    console.line()
    request = found.request
    title = f"{request['collective']} {request['dtype']}, {found.header['ranks']} ranks, " + (
        f"{request['launches']} launches of graphs of {request['iterations']} calls"
        if request["launches"]
        else f"{request['iterations']} eager calls"
    )
    if not found.complete:
        title += ", CUT SHORT"
    shown = table.table_of(found)
    console.table(title, shown.columns, shown.rows, right=shown.right)
    for line in table.remarks(found):
        console.line(line)
    _show_winners(found, console)
    outputs.keep(found)
    if outputs.plot is not None and found.measured:
        plot.draw(found, outputs.plot)
    for name in ("json", "csv", "plot"):
        path = getattr(outputs, name)
        if path is not None:
            console.line(f"{name}: {path}")


def _show_winners(found: Result, console: Console) -> None:
    if len({row.variant for row in found.measured}) < 2:
        return
    for place in dict.fromkeys(row.place for row in found.measured):
        best = winners(found.measured, place)
        if not best:
            continue
        first = next(iter(best.values()))
        changes = "; ".join(str(change) for change in crossovers(best))
        console.line(f"fastest {place}: {first.variant} first{'; ' if changes else ''}{changes}")


def run_compare(arguments: argparse.Namespace, console: Console) -> int:
    """Compare two results. Raises SettingsError for files that do not fit."""
    if arguments.fail_above is not None and arguments.fail_above < 0:
        raise SettingsError(f"--fail-above {arguments.fail_above:g} must be at least 0")
    first, second = (result.read(Path(path)) for path in (arguments.first, arguments.second))
    pairs = compare.pair(first, second)
    title = f"B ({arguments.second}) over A ({arguments.first})"
    console.table(title, table.COMPARED, table.compared(pairs), right=table.COMPARED_RIGHT)
    if any(one.ratio.low is None for one in pairs):
        console.line("no interval: a side has one round only (nccl-tests, --rounds 1)")
    if arguments.fail_above is None:
        return 0
    slower = [one for one in pairs if one.slower_by(arguments.fail_above)]
    console.line(
        f"{len(slower)} of {len(pairs)} are slower by more than {arguments.fail_above:g} %"
    )
    return EXIT_FAILED if slower else 0
