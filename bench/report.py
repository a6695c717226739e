"""What the measurements on devices share: options, the machine, statistics, JSON, timed replays.

Every result stands beside the machine, the versions of all libraries and the command that gave it.
Where two things are compared, both were measured in one run, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from trlow.replay import Replay
from trlow.runtime import Runtime
from trlow.settings import Settings, variables_in_effect

ROOT = Path(__file__).resolve().parents[1]


def parser(question: str | None) -> argparse.ArgumentParser:
    """The options that every measurement has; `question` is the file's docstring."""
    made = argparse.ArgumentParser(
        description=question, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="cuda", choices=("cuda", "host"))
    made.add_argument("--gpus", default="0-1", help="one rank on each of these (default 0-1)")
    made.add_argument("--json", type=Path, help="write the results to this file as well")
    made.add_argument("--note", default="", help="a remark for the JSON, such as a commit")
    made.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of trlow's Settings, such as deadline_s=20",
    )
    return made


def settings_of(arguments: argparse.Namespace, **more: Any) -> Settings:
    """The settings that the options give; `more` wins over them."""
    values: dict[str, Any] = {"device": arguments.device, "gpus": arguments.gpus}
    kinds = {field.name: str(field.type) for field in fields(Settings)}
    for text in arguments.setting:
        name, _, value = text.partition("=")
        kind = kinds.get(name, "")
        read = {"bool": lambda v: v.lower() in {"1", "true", "yes"}, "int": int, "float": float}
        values[name] = read.get(kind.split(" ")[0], str)(value)
    return Settings(**{**values, **more})


# ------------------------------------------------------------------------------ the machine


def machine() -> dict[str, Any]:
    """CPU, Python, GPUs, driver, libraries with versions and paths, variables, and the command."""
    doctor = [sys.executable, "-m", "trlow", "doctor", "--json"]
    told = subprocess.run(
        doctor, capture_output=True, text=True, check=False, timeout=120, env=environment()
    ).stdout
    found = json.loads(told) if told else {}
    return {
        "command": command(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "trlow": found.get("trlow"),
        "gpus": [gpu["name"] for gpu in found.get("gpus", ())],
        "driver": driver(),
        "libraries": {
            entry["name"]: {"version": entry["version"], "path": shortened(entry["path"])}
            for entry in found.get("libraries", ())
        },
        "variables": {k: v for k, v in variables_in_effect().items() if "/" not in v},
    }


def shortened(path: str | None) -> str | None:
    """A library's path from its package on: where an environment stands says nothing here."""
    if path is None:
        return None
    parts = Path(path).parts
    start = parts.index("site-packages") if "site-packages" in parts else max(len(parts) - 1, 0)
    return str(Path(*parts[start:]))


def environment() -> dict[str, str]:
    """This process's variables, with the checkout's trlow in front for one that it starts."""
    places = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def command() -> str:
    """The command as one would type it in the checkout; of other files only the name."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    return shlex.join(("python", str(shown), *words))


def processor() -> str:
    """The processor's name, or the machine's architecture."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver() -> str | None:
    """The kernel driver's version, which no CUDA call tells; None without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout
    return ", ".join(sorted(set(told.split("\n")) - {""})) or None


def header(here: Mapping[str, Any]) -> str:
    """The machine in a few lines."""
    names = here["gpus"] or ["no GPU"]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    libraries = ", ".join(
        f"{name} {entry['version']} ({entry['path']})"
        for name, entry in here["libraries"].items()
        if entry["path"]
    )
    return (
        f"{gpus}, driver {here['driver']}; {here['cpu']}, {here['cores']} cores; "
        f"Python {here['python']}, numpy {here['numpy']}\n{libraries}\n{here['command']}"
    )


# ------------------------------------------------------------------------------ figures


def summary(samples: Iterable[float]) -> dict[str, float]:
    """Count, median, spread and the far percentiles; all NaN-free or absent."""
    values = np.asarray(list(samples), dtype=float)
    if not values.size:
        return {"count": 0}
    p5, p95, p99 = (float(v) for v in np.percentile(values, (5, 95, 99)))
    return {
        "count": int(values.size),
        "median": float(np.median(values)),
        "least": float(values.min()),
        "p5": p5,
        "p95": p95,
        "p99": p99,
        "most": float(values.max()),
    }


def short(found: Mapping[str, float], digits: int = 2) -> str:
    """A summary in a few words."""
    if not found["count"]:
        return "no samples"
    return (
        f"{found['median']:.{digits}f} (least {found['least']:.{digits}f}, "
        f"p95 {found['p95']:.{digits}f}, p99 {found['p99']:.{digits}f}, "
        f"most {found['most']:.{digits}f}; {found['count']:,})"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print numbers under their titles; the first column leans left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in (list(columns), *cells):
        first, *others = (
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *others)).rstrip())


def verdict(met: bool) -> str:
    """Whether a bar is met, in a word."""
    return "met" if met else "MISSED"


def save(arguments: argparse.Namespace, here: Mapping[str, Any], results: Any) -> None:
    """Write the JSON if it was asked for. Numbers that JSON cannot hold become null."""
    if arguments.json is None:
        return
    kept = {"machine": here, "device": arguments.device, "note": arguments.note}
    text = json.dumps({**kept, "results": _strict(results)}, indent=1, allow_nan=False)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(text + "\n", encoding="utf-8")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------ timed replays


def on_ranks(runtime: Runtime, function: Callable[[Any], Any], *, launches: bool = False) -> Any:
    """`function(rank)` on every rank's own thread; `launches` if it launches collectives."""
    team = runtime._team  # noqa: SLF001  no public call runs a stranger's code on rank threads
    return team.together(function, launches=launches)


def prepared(replay: Replay) -> Sequence[Any]:
    """Each rank's resolved steps: handles, graphs, slots."""
    return replay._prepared  # noqa: SLF001  what is measured is this loop, from within its thread


def rank_seconds(runtime: Runtime, replay: Replay, steps: int, fill: Any = None) -> list[float]:
    """Seconds of `steps` steps, told by each rank: from a common start until its last has ended.

    The loop is trlow's own. The clock is read on the ranks' threads, so that starting and joining
    jobs is left out.
    """
    ready = prepared(replay)
    gate = threading.Barrier(len(ready), timeout=60)

    def timed(rank: Any) -> float:
        if fill is not None:
            ready[rank.index].prologue(fill, 0)
        gate.wait()
        begun = time.perf_counter()
        ready[rank.index].run(steps, fill, 0)
        return time.perf_counter() - begun

    seconds: list[float] = on_ranks(runtime, timed, launches=True)
    return seconds
