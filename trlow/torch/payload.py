"""What one step is given: each rank's part of the batch, and learning rates where they changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Payload:
    """Of one step, for all ranks."""

    shards: list[list[torch.Tensor]]  # by rank, then by leaf of the batch
    rates: tuple[float, ...] | None  # by parameter group; None: as before
    callers: dict[torch.device, int]  # streams behind which shards on a GPU are complete
    replay: int  # which one takes it, in the order of capture


def callers(parts: list[list[torch.Tensor]]) -> dict[torch.device, int]:
    """The current stream (cudaStream_t) of each GPU that holds part of the batch.

    Only its number: a call of CUDA would wait while a rank's thread launches on that GPU.
    """
    devices = {tensor.device for part in parts for tensor in part if tensor.is_cuda}
    return {device: torch._C._cuda_getCurrentRawStream(device.index) for device in devices}
