"""Who begins and ends a capture: CUDA itself, or a library that wants to know of it."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from trlow.device import Platform

THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads' calls are their own business


class Recorded(NamedTuple):
    """What was captured."""

    graph: int  # cudaGraph_t, which is the caller's
    release: Callable[[], None]  # to be called when that goes: it may not be all that there is


class Recorder(Protocol):
    """Of one rank, on its own thread, which has at most one capture open at a time."""

    def begin(self, stream: int) -> None:
        """Begin a thread-local capture."""

    def end(self, stream: int) -> Recorded:
        """End it."""

    def forget(self, stream: int) -> None:
        """One that was to begin, or was begun, has failed, and ``stream`` captures no more."""


class PlainRecorder:
    """CUDA's own calls."""

    def __init__(self, platform: Platform) -> None:
        self._cudart = platform.cudart

    def begin(self, stream: int) -> None:
        """Begin a capture. Raises ``CudaError``."""
        self._cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)

    def end(self, stream: int) -> Recorded:
        """End it. Raises ``CudaError``, for one that was invalidated as well."""
        graph = c_void_p()
        self._cudart.cudaStreamEndCapture(stream, byref(graph))
        return Recorded(graph.value or 0, lambda: None)

    def forget(self, stream: int) -> None:
        """Nobody else knows of it."""
