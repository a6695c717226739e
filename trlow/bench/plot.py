"""The picture: time and bandwidth over size on log axes, a line per variant, the winner marked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trlow.bench.result import Result, Row
from trlow.bench.sizes import short
from trlow.bench.winners import crossovers, winners
from trlow.errors import SettingsError

SUFFIXES = (".svg", ".png")
STYLES = {"in-place": "-", "out-of-place": "--"}


def check_plot(path: Path) -> None:
    """Raise SettingsError, before measuring, for what could not be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"--plot {path}: give a name that ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib: pip install 'trlow[plot]'")


def draw(result: Result, path: Path) -> None:
    """Write the picture of everything measured."""
    # Loaded here: matplotlib is optional and costs a second.
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 9), layout="constrained")
    times, speeds = figure.subplots(2, 1, sharex=True)
    _lines(times, speeds, result.measured)
    places = list(dict.fromkeys(row.place for row in result.measured))
    for place in places:
        best = winners(result.measured, place)
        if len({row.variant for row in result.measured}) > 1:
            _mark(times, speeds, best)
    times.set(ylabel="time of one call, µs", xscale="log", yscale="log")
    speeds.set(ylabel="algbw (busbw on the right), GB/s", xscale="log", yscale="log")
    speeds.set_xlabel("size, bytes")
    _busbw_axis(speeds, result.measured)
    sizes = sorted({row.size for row in result.measured})
    for axes in (times, speeds):
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.set_xticks(sizes[:: max(1, len(sizes) // 14)])
        axes.set_xticklabels([short(size) for size in axes.get_xticks()], rotation=45)
        axes.minorticks_off()
    times.legend(fontsize="small")
    figure.suptitle(_title(result), fontsize="medium")
    with rc_context({"svg.hashsalt": "trlow"}):  # the same numbers give the same file
        figure.savefig(path, format=path.suffix[1:].lower(), metadata=_undated(path))


def _lines(times: Any, speeds: Any, rows: list[Row]) -> None:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.variant, row.place), []).append(row)
    several = len({row.place for row in rows}) > 1
    names = list(dict.fromkeys(row.variant for row in rows))
    for (name, place), own in lines.items():
        label = f"{name}, {place}" if several else name
        style = {"color": f"C{names.index(name) % 10}", "linestyle": STYLES[place], "label": label}
        sizes = [row.size for row in own]
        spreads = [row.spread for row in own]
        times.plot(sizes, [row.time_us for row in own], marker=".", linewidth=1.2, **style)
        bounds = ([one.p5_us for one in spreads], [one.p95_us for one in spreads])
        times.fill_between(sizes, *bounds, alpha=0.12, color=style["color"])
        speeds.plot(sizes, [row.algbw for row in own], marker=".", linewidth=1.2, **style)


def _mark(times: Any, speeds: Any, best: dict[int, Row]) -> None:
    """A ring around the fastest of each size, and a line where that changes."""
    sizes = list(best)
    ring = {"marker": "o", "s": 60, "facecolors": "none", "edgecolors": "black", "zorder": 5}
    times.scatter(sizes, [row.time_us for row in best.values()], label="fastest", **ring)
    speeds.scatter(sizes, [row.algbw for row in best.values()], **ring)
    for change in crossovers(best):
        for axes in (times, speeds):
            axes.axvline(change.size, color="gray", linewidth=0.8, linestyle=":")


def _busbw_axis(speeds: Any, rows: list[Row]) -> None:
    factors = {row.factor for row in rows}
    if len(factors) != 1 or 0 in factors:
        return
    (factor,) = factors
    axis = speeds.secondary_yaxis(
        "right", functions=(lambda value: value * factor, lambda value: value / factor)
    )
    axis.set_ylabel("busbw, GB/s")


def _title(result: Result) -> str:
    request, header = result.request, result.header
    names = header.get("gpus", [])
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    library = header.get("libraries", {}).get("nccl", {})
    launches = request.get("launches", 0)
    ways = f"graphs of {request.get('iterations')} calls" if launches else "eager"
    what = f"{request.get('collective')} {request.get('dtype')} {request.get('op')}, {ways}"
    cut = "" if result.complete else " (cut short)"
    return f"{what}{cut}\n{gpus}, NCCL {library.get('version')}"


def _undated(path: Path) -> dict[str, Any]:
    """No date, which would differ in every run."""
    return {"Date": None} if path.suffix.lower() == ".svg" else {}
