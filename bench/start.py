"""How long from starting a process to the end of the first trained step?

    python bench/start.py [--runs 5] [--json FILE]

Fresh processes, one after another, each doing what `trlow train` does with the digits CNN until its
first step has ended on every rank. One run before the first fills the kernel cache and is shown
apart. Bar: 2.5 s beside ncclCommInitAll and data loading (scikit-learn's import is most of it),
which are reported. The clock starts before the process does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report

CHILD = Path(__file__).with_name("start_child.py")
BAR_S = 2.5


def start(arguments: argparse.Namespace) -> dict[str, float]:
    """One process: seconds by part, and in all."""
    fields = asdict(report.settings_of(arguments))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(fields)],
        env=report.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ended = time.monotonic()
    if done.returncode:
        raise SystemExit(f"a start failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    spent: dict[str, float] = told["spent"]
    init, data = spent.get("ncclCommInitAll", 0.0), spent["data"]
    total = told["done"] - begun
    return {
        "total": total,
        "ncclCommInitAll": init,
        "data": data,
        "beside": total - init - data,
        "interpreter": told["interpreter"] - begun,
        "imports": told["imported"] - told["interpreter"],
        "libraries": spent["libraries"],
        "runtime": spent["runtime"] - init,
        "capture": spent["capture"],
        "initial state": spent["initial state"],
        "first step": told["done"] - told["compiled"],
        "close": told["closed"] - told["done"],
        "exit": ended - told["closed"],
    }


def main() -> None:
    made = report.parser(__doc__)
    made.add_argument("--runs", type=int, default=5)
    arguments = made.parse_args()
    here = report.machine()
    print(report.header(here))
    first = start(arguments)
    print(f"first of all: {first['total']:.2f} s, {first['beside']:.2f} s beside the two")
    runs = [start(arguments) for _ in range(arguments.runs)]
    found = {name: report.summary(run[name] for run in runs) for name in runs[0]}
    for name, one in found.items():
        print(f"{name:16} {one['median']:6.3f} s ({one['least']:.3f}..{one['most']:.3f})")
    met = found["beside"]["median"] <= BAR_S
    print(
        f"beside ncclCommInitAll and data {found['beside']['median']:.2f} s {report.verdict(met)}"
    )
    report.save(arguments, here, {"first": first, "runs": found, "bar_s": BAR_S, "met": met})


if __name__ == "__main__":
    main()
