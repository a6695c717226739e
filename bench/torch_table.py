"""What bench/torch_ddp.py has measured of a side, as a line of JSON and of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import report
from torch_process import RunningSide

RATIOS = ("ratio", "ratio_same", "ratio_awake")


@dataclass
class Found:
    """What was measured of one side of one model."""

    side: RunningSide
    steps: int = 1
    rounds: list[list[dict[str, float]]] = field(default_factory=list)  # by round, by process
    memory: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None

    def samples(self, key: str) -> list[float]:
        """Of each round the slower process's."""
        return [max(process[key] for process in one) for one in self.rounds]

    def finish(self) -> None:
        """End the side; its loss is the mean over processes, so that one NaN is seen."""
        self.loss = statistics.mean(one["loss"] for one in self.side.finish())

    def ratio_to(self, other: Found | None) -> dict[str, Any] | None:
        """Round by round, so that a drift of the clocks cancels."""
        if other is None or not (self.rounds and other.rounds):
            return None
        pairs = zip(self.samples("step_s"), other.samples("step_s"), strict=False)
        ratios = [mine / theirs for mine, theirs in pairs]
        by_round = {"of": other.side.name, "by_round": ratios}
        return {"median": statistics.median(ratios), **by_round}

    def line(self, wave: Mapping[str, Found]) -> dict[str, Any]:
        """As it stands in the JSON; seconds become ms and us."""
        steps = self.samples("step_s")
        first = next(iter(wave.values()), None)
        alone = {
            found.side.variant.awake: found
            for found in wave.values()
            if found.side.variant.base == "alone"
            and found.side.variant.compiled == self.side.variant.compiled
        }
        setup = self.side.setup
        return {
            "side": self.side.name,
            "failure": self.side.failure,
            "ms": report.summary(1e3 * one for one in steps),
            "ms_by_process": [[1e3 * one["step_s"] for one in each] for each in self.rounds],
            "ratio": self.ratio_to(first),  # to the first side that was there
            "ratio_same": self.ratio_to(alone.get(False)),  # to its own kernels alone
            "ratio_awake": self.ratio_to(alone.get(True)),  # and with links awake
            "issue_us": report.summary(1e6 * one for one in self.samples("issue_s")),
            "issue_cpu_us": report.summary(1e6 * one for one in self.samples("issue_cpu_s")),
            "cpu_us": report.summary(1e6 * one for one in self.samples("cpu_s")),
            "steps_per_round": self.steps,
            "loss": self.loss,
            "warm_loss": statistics.mean(one["warm_loss"] for one in setup) if setup else None,
            "memory": self.memory,
            "ready_s": self.side.ready_s,
            "setup_s": [process["setup"] for process in setup],
            "compiled_frames": [process["frames"] for process in setup],
        }


def report_setup(model: str, sides: Sequence[RunningSide]) -> None:
    for side in sides:
        parts = "; ".join(
            ", ".join(f"{name} {seconds}" for name, seconds in process["setup"].items())
            + (f", frames {process['frames']}" if process["frames"] else "")
            for process in side.setup
        )
        print(f"{model} {side.name}: ready after {side.ready_s} s ({parts})", flush=True)


def show(model: str, lines: Sequence[dict[str, Any]]) -> None:
    cells = []
    for line in lines:
        if not line["ms"]["count"]:
            cells.append([line["side"], line["failure"] or "no rounds", *("-" * 9)])
            continue
        ms, loss = line["ms"], line["loss"]
        wrong = line["failure"] or ("" if loss is not None and loss - loss == 0 else "NOT FINITE")
        cells.append(
            [
                line["side"],
                f"{ms['median']:.3f} ({ms['least']:.3f}..{ms['most']:.3f})",
                *(f"{line[k]['median']:.3f}" if line[k] else "-" for k in RATIOS),
                f"{line['issue_us']['median']:.0f}",
                f"{line['issue_cpu_us']['median']:.0f}",
                f"{line['cpu_us']['median']:.0f}",
                mebibytes(line["memory"]),
                f"{line['warm_loss']:.4f}",
                f"{loss:.4f} {wrong}" if loss is not None else wrong,
            ]
        )
    times = (
        "ms per step (least..most)",
        "ratio",
        "same",
        "awake",
        "issue us",
        "its CPU",
        "all CPU",
    )
    titles = (*times, "MiB", "loss@12", "loss")
    report.table((model, *titles), cells)
    print(flush=True)


def mebibytes(memory: dict[str, Any]) -> str:
    """Of the fullest GPU: nvidia-smi's word if there is one, else torch's with a sign."""
    for key in ("smi_mib", "freed_mib"):
        if memory.get(key):
            return str(max(memory[key]))
    peaks = [peak for one in memory.get("torch", ()) for peak in one.get("reserved_peak", ())]
    return f"torch {max(peaks) >> 20}" if peaks else "-"
