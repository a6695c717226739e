"""`trlow doctor`: what is here, and what cannot work."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from trlow.cli.console import Console
from trlow.cli.findings import Findings, Gpu, Shared, examine
from trlow.cli.units import binary
from trlow.settings import Settings

EXIT_BROKEN = 1


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Show the findings; 0 unless trlow itself is broken."""
    found = examine(Settings.from_environment())
    if arguments.json:
        console.line(json.dumps(asdict(found), indent=2))
    else:
        _show(console, found)
    return 0 if found.ok else EXIT_BROKEN


def _show(console: Console, found: Findings) -> None:
    state = "works" if found.ok else "IS BROKEN"
    console.line(f"trlow {found.trlow} {state}; Python {found.python}, numpy {found.numpy}")
    console.line()
    console.table(
        "libraries",
        ("name", "version", "how found", "path"),
        [row for shared in found.libraries for row in _library_rows(shared)],
    )
    console.line()
    rows = [("host", f"0-{found.host_devices - 1}", "the host device", "", "")]
    rows += [_gpu_row(gpu) for gpu in found.gpus]
    console.table("devices", ("kind", "index", "name", "compute", "memory free / total"), rows)
    if len(found.gpus) > 1:
        console.line()
        console.table(
            "peer access",
            ("from \\ to", *(str(gpu.index) for gpu in found.gpus)),
            [
                (str(here), *("yes" if can else "no" for can in row))
                for here, row in enumerate(found.peer_access)
            ],
        )
    console.line()
    cache = found.kernel_cache
    unusable = f"; cannot be used, so every start compiles: {cache.problem}"
    console.line(f"kernel cache: {cache.folder or 'none'}{unusable if cache.problem else ''}")
    console.line()
    if found.environment:
        console.table("environment", ("variable", "value"), list(found.environment.items()))
    else:
        console.line("environment: no variable in effect")
    console.line()
    if not found.cannot:
        console.line("everything can work")
        return
    console.line("cannot work here:")
    for problem in found.cannot:
        console.line(f"  {problem.what}: {' '.join(problem.why.split())}")


def _library_rows(shared: Shared) -> list[tuple[str, str, str, str]]:
    how, path = shared.how or "missing", shared.path or "see below"
    first = (shared.name, shared.version or "", how, path)
    return [first, *(("", "", "second copy", path) for path in shared.copies)]


def _gpu_row(gpu: Gpu) -> tuple[str, str, str, str, str]:
    memory = f"{binary(gpu.free_nbytes)} / {binary(gpu.memory_nbytes)}"
    return ("cuda", str(gpu.index), gpu.name, gpu.compute_capability, memory)
