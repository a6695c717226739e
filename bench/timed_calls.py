"""The Python side of timed_calls.c: build it for a library, start it, read what it noted."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trlow.device import Platform
from trlow.settings import Settings

SOURCE = Path(__file__).with_name("timed_calls.c")
NOTE = np.dtype(
    [("kind", np.int64), ("begun", np.int64), ("ended", np.int64), ("handle", np.int64)]
)
LAUNCH = 0
KINDS = ("cudaGraphLaunch", "cudaEventRecord", "cudaEventSynchronize", "cudaStreamWaitEvent")
FIRST = 20  # steps left out: the first call of a thread allocates


class TimedCalls:
    """A library that stands in for the CUDA runtime, or for the whole host device."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Compile in `folder` for the runtime that `settings` find."""
        library = Platform.open(settings)
        real = Path((library.host or library.cudart).path)
        self.path = folder / "libtimed.so"
        compiler = shutil.which("cc") or "gcc"
        command = [compiler, "-O2", "-shared", "-fPIC", f'-DREAL="{real}"', "-o", str(self.path)]
        command += [str(SOURCE), "-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{real.parent}"]
        subprocess.run([*command, "-ldl"], check=True)
        self._field = "host_library" if settings.device == "host" else "cudart_library"
        self._library = ctypes.CDLL(str(self.path))
        word, pointer = ctypes.c_int64, ctypes.POINTER
        self._library.timed_start.argtypes = (word, word)
        self._library.timed_start.restype = None
        self._library.timed_notes.argtypes = (word, pointer(ctypes.c_void_p))
        self._library.timed_notes.restype = word
        floats = pointer(ctypes.c_float)
        self._library.timed_device.argtypes = (word, floats, floats)
        self._library.timed_device.restype = word

    @property
    def settings(self) -> dict[str, Any]:
        """The field of Settings that takes this library."""
        return {self._field: str(self.path)}

    def start(self, notes: int, launches: int = 0) -> None:
        """Forget everything and note up to `notes` calls a thread; time `launches` on the device.

        0 notes stops; what was noted can then be read.
        """
        self._library.timed_start(notes, launches)

    def notes(self, threads: int) -> list[NDArray[Any]]:
        """What each thread noted since `start`, in order. The threads are in no order."""
        found = []
        for index in range(threads):
            pointer = ctypes.c_void_p()
            count = self._library.timed_notes(index, ctypes.byref(pointer))
            raw = ctypes.string_at(pointer.value or 0, count * NOTE.itemsize) if count else b""
            found.append(np.frombuffer(raw, NOTE))
        return found

    def device(self, threads: int, launches: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Of each thread's launches: us on the device, and us from its end to the next's begin."""
        found = []
        for index in range(threads):
            busy, gap = (ctypes.c_float * launches)(), (ctypes.c_float * launches)()
            count = self._library.timed_device(index, busy, gap)
            found.append((np.array(busy[:count]), np.array(gap[:count])))
        return found


@dataclass(frozen=True)
class Steps:
    """Per step of one thread, all in us: the host's period, what was not C, what was."""

    period: NDArray[Any]
    python: NDArray[Any]
    calls: dict[str, NDArray[Any]]  # by function: each single call


def steps_of(notes: NDArray[Any], executables: Collection[int], launches_per_step: int) -> Steps:
    """Cut one thread's notes at the first launch of each step.

    A step counts if nothing but the train program was launched up to the beginning of the next.
    """
    begun, ended = notes["begun"], notes["ended"]
    between = np.concatenate(([0], np.cumsum(begun[1:] - ended[:-1])))
    launches = np.flatnonzero(notes["kind"] == LAUNCH)
    ours = np.isin(notes["handle"][launches], list(executables))
    periods: list[float] = []
    python: list[float] = []
    for run in runs_of(ours):
        firsts = launches[run][::launches_per_step][FIRST:]
        periods.extend(np.diff(begun[firsts]) / 1e3)
        python.extend(np.diff(between[firsts]) / 1e3)
    calls = {name: (ended - begun)[notes["kind"] == kind] / 1e3 for kind, name in enumerate(KINDS)}
    return Steps(np.array(periods), np.array(python), calls)


def runs_of(flags: NDArray[Any]) -> Sequence[slice]:
    """The stretches where `flags` holds."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
