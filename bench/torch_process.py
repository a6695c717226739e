"""Processes of the sides of bench/torch_ddp.py: started, commanded through pipes, given up on.

Nothing here touches a GPU. Every answer has a deadline. A process that misses it prints its stacks
and ends itself; what does not even do that is killed, with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report
from torch_variant import Variant

SCRIPT = Path(__file__).with_name("torch_sides.py")
GRACE_S = 10.0  # that a process has to print its stacks by itself
TAIL = 40  # lines of a failed process's log that are shown


class SideFailedError(Exception):
    """A side gave no answer, or ended."""


class Process:
    """One process of a side."""

    def __init__(self, spec: Mapping[str, Any], env: Mapping[str, str], log: Path) -> None:
        self.log, self._over = log, False
        with log.open("w", encoding="utf-8") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, command: Mapping[str, Any]) -> None:
        """Send a command. Raises SideFailedError if nobody reads it."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(command) + "\n")
            self.popen.stdin.flush()
        except OSError as error:
            raise SideFailedError("ended before it was asked") from error

    def answer(self, until: float) -> dict[str, Any]:
        """The next line. Raises SideFailedError at the end of the process, or of the time."""
        try:
            line = self._answers.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            raise SideFailedError("gave no answer in time") from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(GRACE_S)
            raise SideFailedError(f"ended with code {self.popen.returncode}")
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self) -> None:
        """Kill it and what it started; a process that has ended by itself is only collected."""
        if self._over:
            return  # its number may be somebody else's by now
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one may hang in the driver
            self.popen.wait(GRACE_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def tail(self) -> str:
        """The end of its log, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-TAIL:])


class RunningSide:
    """The processes of one side of one model."""

    def __init__(
        self,
        variant: Variant,
        common: Mapping[str, Any],
        gpus: tuple[int, ...],
        folder: Path,  # for what processes share
        logs: Path,
    ) -> None:
        self.variant, self.name, self.common = variant, variant.name, common
        self.failure: str | None = None
        self.begun, self.ready_s = time.monotonic(), 0.0
        self.setup: list[dict[str, Any]] = []
        name = f"{common['model']}.{variant.name}.{time.monotonic_ns()}"
        self.processes = [
            Process(
                spec_of(variant, common, gpus, rank) | {"store": str(folder / name)},
                environment(variant, common, gpus, rank, folder),
                logs / f"{name}.{rank}.log",
            )
            for rank in range(variant.processes)
        ]

    def _all(self, seconds: float) -> list[dict[str, Any]]:
        """One answer from each process. What fails ends the side; the others are not touched."""
        until = time.monotonic() + seconds
        try:
            return [process.answer(until) for process in self.processes]
        except SideFailedError as error:
            self.fail(str(error))
            raise

    def _command(self, deadline_s: float, **asked: Any) -> list[dict[str, Any]]:
        try:
            for process in self.processes:
                process.ask({**asked, "deadline_s": deadline_s})
        except SideFailedError as error:
            self.fail(str(error))
            raise
        return self._all(deadline_s + GRACE_S)

    def ready(self) -> None:
        """Wait for the set-up."""
        left = self.common["setup_s"] + GRACE_S - (time.monotonic() - self.begun)
        self.setup = self._all(left)
        self.ready_s = round(time.monotonic() - self.begun, 1)

    def steps(self, count: int, warm: int) -> list[dict[str, float]]:
        """Run steps on all processes at once."""
        at = time.monotonic() + 0.005
        return self._command(self.common["deadline_s"], steps=count, warm=warm, at=at)

    def memory(self) -> list[dict[str, Any]]:
        """What each process knows of its memory."""
        return self._command(self.common["deadline_s"], memory=True)

    def finish(self) -> list[dict[str, Any]]:
        """The loss, then the end; a side that cannot close is told of, its figures stay."""
        found = self._command(self.common["deadline_s"], end=True)
        try:
            until = time.monotonic() + self.common["deadline_s"]
            for process in self.processes:
                process.answer(until)
        except SideFailedError as error:
            print(f"{self.name}: close(): {error}\n{self.tails()}", file=sys.stderr, flush=True)
        self.end()
        return found

    def fail(self, why: str) -> None:
        """End it and say why, with what its processes printed last."""
        self.failure = why
        hung = [process for process in self.processes if process.popen.poll() is None]
        if "no answer" in why:
            for process in hung:  # its own timer has printed the stacks, or never will
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(2)
        self.end()
        print(f"{self.name} failed: {why}\n{self.tails()}", file=sys.stderr, flush=True)

    def tails(self) -> str:
        """The ends of the logs; two of a kind once."""
        return "\n".join(dict.fromkeys(process.tail() for process in self.processes))

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.end()


def spec_of(
    variant: Variant, common: Mapping[str, Any], gpus: tuple[int, ...], rank: int
) -> dict[str, Any]:
    """What one process is told at its start."""
    mine = "0" if variant.nocomm else ",".join(map(str, gpus))
    own = {"side": variant.name, "rank": rank, "world_size": len(gpus), "gpu": gpus[rank]}
    own["peer"] = gpus[(rank + 1) % len(gpus)]
    return {**common, **own, "settings": {**common["settings"], "gpus": mine}}


def environment(
    variant: Variant, common: Mapping[str, Any], gpus: tuple[int, ...], rank: int, folder: Path
) -> dict[str, str]:
    """Variables of one process: this one's, loopback alone, and what the side asks for."""
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # unless one is kept between runs
        **report.environment(),
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(common["threads"]),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(4, common["threads"])),
    }
    if variant.cta:
        env["NCCL_MAX_CTAS"] = str(variant.cta)
    if variant.nop2p:
        env["NCCL_P2P_DISABLE"] = "1"
    if variant.base == "ddp" and variant.graph:
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as torch's recipe for such graphs says
    if variant.nocomm and common["device"] == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(64)]
        env["CUDA_VISIBLE_DEVICES"] = names[gpus[rank]]
    return env


def smi_memory(sides: list[RunningSide]) -> dict[str, list[int]]:
    """MiB of each side on each GPU that it uses, by nvidia-smi; empty if that tells nothing."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory"]
    try:
        told = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    owner = {str(process.popen.pid): side.name for side in sides for process in side.processes}
    found: dict[str, dict[str, int]] = {}
    for line in told.splitlines():
        pid, gpu, mib = (part.strip() for part in f"{line},,".split(",")[:3])
        if pid in owner and mib.isdigit():
            by_gpu = found.setdefault(owner[pid], {})
            by_gpu[gpu] = by_gpu.get(gpu, 0) + int(mib)
    return {name: list(by_gpu.values()) for name, by_gpu in found.items()}


def smi_used() -> list[int]:
    """MiB of each GPU that anybody uses."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) for line in told.split() if line.isdigit()]
