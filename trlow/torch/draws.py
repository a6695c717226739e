"""Random numbers of a captured step, such as dropout's: other ones in each replay.

Torch's generator counts on the host what its kernels draw. In a capture of torch's own they read
that count from device memory instead, and a replay of torch's own writes it there. So where a step
draws, torch's CUDAGraph begins and ends the capture. What it recorded is trlow's; torch keeps an
empty graph, whose replay ahead of the step does the counting and nothing else. A step draws the
numbers that it would have drawn without a capture.
"""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

import torch

from trlow.nodes import INVALIDATED, capture_status, nodes_of
from trlow.program import Stream
from trlow.recording import PlainRecorder, Recorded
from trlow.torch.inputs import stream_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from trlow.enqueue import Rank


def generator_state(device: torch.device) -> torch.Tensor:
    """Of the generator that draws where none is named."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def undrawn(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """What is drawn meanwhile, on the host or on these devices, counts as not drawn."""
    indices = {device.index for device in devices if device.type == "cuda"}
    return torch.random.fork_rng(sorted(indices))


class Draws:
    """The captures of one rank whose steps draw. Everything here is on that rank's own thread."""

    def __init__(self, rank: Rank, device: torch.device, pool: torch.cuda.MemPool) -> None:
        """``pool`` gets what is allocated in captures."""
        self._platform, self._update = rank.platform, rank.streams[Stream.UPDATE]
        self._plain = PlainRecorder(rank.platform)
        self._device, self._pool = device, pool.id
        self._graphs: list[torch.cuda.CUDAGraph] = []  # in the order of capture, now empty
        self._open: torch.cuda.CUDAGraph | None = None
        self._spot = torch.empty(1, device=device)

    @property
    def recording(self) -> bool:
        """Whether a capture is open. Allocations in it are led to the pool."""
        return self._open is not None

    def begin(self, stream: int) -> None:
        """Begin a capture of torch's."""
        graph = self._open = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(self._device), self._on(stream):
            graph.capture_begin(
                self._pool,  # type: ignore[arg-type]  # torch's own type of it is a pair of ints
                capture_error_mode="thread_local",
            )

    def end(self, stream: int) -> Recorded:
        """End it; what was recorded moves into a graph of the caller's.

        What NCCL hangs on a graph stays with torch's as well, and an abort waits for its end.
        """
        torchs = self._open
        if torchs is None or capture_status(self._platform, stream) == INVALIDATED:
            return self._plain.end(stream)  # CUDA says why; see `forget`
        with torch.cuda.device(self._device), self._on(stream):
            torchs.capture_end()
        self._open = None
        graph = c_void_p()
        self._platform.cudart.cudaGraphClone(byref(graph), torchs.raw_cuda_graph())
        for node, _ in nodes_of(self._platform, torchs.raw_cuda_graph()):
            self._platform.driver.cuGraphDestroyNode(node)
        self._graphs.append(torchs)
        return Recorded(graph.value or 0, torchs.reset)

    def forget(self, stream: int) -> None:
        """Torch goes on as if it were open, and cannot end a capture that is not there: end one."""
        torchs, self._open = self._open, None
        if torchs is None:
            return
        self._plain.begin(stream)
        spot = self._spot.data_ptr()  # torch warns of a capture without a node
        self._platform.cudart.cudaMemsetAsync(spot, 0, self._spot.nbytes, stream)
        with torch.cuda.device(self._device), self._on(stream):
            torchs.capture_end()
        torchs.reset()

    def _on(self, stream: int) -> torch.cuda.StreamContext:
        return torch.cuda.stream(stream_of(stream, self._device))

    def settle(self) -> None:
        """After the captures."""
        for graph in self._graphs:
            graph.instantiate()

    def count(self, index: int) -> None:
        """Ahead of a replay of the ``index``-th graph: what it draws is drawn."""
        with self._on(self._update):
            self._graphs[index].replay()

    def close(self) -> None:
        """Forget torch's graphs, which went with the caller's."""
        self._graphs.clear()
