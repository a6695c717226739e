"""The head of a result: machine, libraries, variables, and how warm the GPUs are.

What no CUDA call tells comes from nvidia-smi; where that is missing or silent, a fact is None.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trlow.settings import variables_in_effect
from trlow.version import __version__

LIMIT_S = 20
STATE = ("temperature.gpu", "clocks.sm", "clocks.mem", "power.draw")  # °C, MHz, MHz, W
STATE_NAMES = ("temperature_c", "sm_mhz", "memory_mhz", "power_w")


def ask_smi(*arguments: str) -> list[list[str]]:
    """Lines of comma-separated cells; none where nvidia-smi is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        told = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, check=True, timeout=LIMIT_S
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line]


class Machine:
    """The GPUs of a run as nvidia-smi numbers them, found by their PCI addresses."""

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self._hello = hello
        self._indices: list[int] = []
        if hello["platform"] != "host":
            rows = ask_smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
            by_bus = {_bus(cells[1]): int(cells[0]) for cells in rows if len(cells) == 2}
            self._indices = [by_bus[_bus(b)] for b in hello["buses"] if _bus(b) in by_bus]

    def header(self) -> dict[str, Any]:
        """What does not change while measuring."""
        hello = self._hello
        driver = ask_smi("--query-gpu=driver_version", "--format=csv,noheader")
        on_host = hello["platform"] == "host"
        return {
            "trlow": __version__,
            "command": shlex.join(("trlow", *sys.argv[1:])),
            "python": platform.python_version(),
            "system": platform.platform(),
            "platform": hello["platform"],
            "ranks": hello["ranks"],
            "devices": hello["devices"],
            "gpus": hello["names"],
            "links": self.links(),
            "peer_access": hello["peer_access"],
            "driver": driver[0][0] if driver and not on_host else None,
            "libraries": hello["libraries"],
            "variables": variables_in_effect(),
            "other_processes": [] if on_host else self.processes(),
        }

    def links(self) -> dict[str, str] | None:
        """How pairs of these GPUs are linked, in `nvidia-smi topo -m`'s words (NV18, PIX, SYS)."""
        if len(self._indices) < 2:
            return None
        lines = [cells[0] for cells in ask_smi("topo", "-m") if cells]
        return read_links(lines, self._indices)

    def processes(self) -> list[str]:
        """Processes that compute on any GPU of the machine; ask before the workers start."""
        query = "--query-compute-apps=pid,process_name,used_memory"
        return [" ".join(cells) for cells in ask_smi(query, "--format=csv,noheader")]

    def state(self) -> list[dict[str, float | None]] | None:
        """Temperature, clocks and power of each GPU now."""
        if not self._indices:
            return None
        rows = ask_smi(
            f"--query-gpu={','.join(STATE)}",
            "--format=csv,noheader,nounits",
            f"--id={','.join(str(index) for index in self._indices)}",
        )
        return [dict(zip(STATE_NAMES, map(_number, cells), strict=False)) for cells in rows] or None


def read_links(lines: Sequence[str], indices: Sequence[int]) -> dict[str, str] | None:
    """The pairs' words in the matrix of `nvidia-smi topo -m`."""
    rows: dict[str, list[str]] = {}
    columns: list[str] = []
    for line in lines:
        cells = line.replace("\x1b[4m", "").replace("\x1b[0m", "").split()
        if cells and cells[0] == "GPU0" and not columns and "X" not in cells:
            columns = cells
        elif cells and cells[0].startswith("GPU") and columns:
            rows[cells[0]] = cells[1:]
    found = {}
    for place, first in enumerate(indices):
        for second in indices[place + 1 :]:
            row = rows.get(f"GPU{first}", [])
            at = columns.index(f"GPU{second}") if f"GPU{second}" in columns else len(row)
            if at < len(row):
                found[f"{first}-{second}"] = row[at]
    return found or None


def lines(header: Mapping[str, Any]) -> list[str]:
    """The head as a person reads it."""
    names = header["gpus"]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    links = header["links"]
    linked = ", ".join(f"{pair} {word}" for pair, word in links.items()) if links else "unknown"
    found = [f"{gpus} (devices {', '.join(map(str, header['devices']))})"]
    if header["platform"] != "host":
        found[0] += f", links {linked}, driver {header['driver'] or 'unknown'}"
    for name, library in header["libraries"].items():
        found.append(f"{name} {library['version']} from {library['path']}")
    for when in ("before", "after"):
        for device, state in enumerate(header.get(when) or ()):
            said = ", ".join(
                f"{key} {value:g}" for key, value in state.items() if value is not None
            )
            found.append(f"{when}, rank {device}: {said}")
    if header["other_processes"]:
        found.append(f"other processes on the GPUs: {'; '.join(header['other_processes'])}")
    variables = header["variables"]
    chosen = [f"{name}={variables[name]}" for name in variables if name.startswith("NCCL_")]
    found.append(f"variables: {' '.join(chosen) or 'no NCCL_* variable'}")
    found.append(f"trlow {header['trlow']}, Python {header['python']}: {header['command']}")
    return found


def _bus(text: str) -> str:
    """nvidia-smi writes eight digits of the domain, CUDA four."""
    return text.lower()[-12:]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
