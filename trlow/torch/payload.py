"""What one step is given: each rank's part of the batch, and learning rates where they changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trlow.replay import RUN_AHEAD


@dataclass(frozen=True, slots=True)
class Payload:
    """Of one step, for all ranks."""

    shards: list[list[torch.Tensor]]  # by rank, then by leaf of the batch
    rates: tuple[float, ...] | None  # by parameter group; None: as before
    ready: dict[torch.device, torch.cuda.Event]  # behind which shards on a GPU are complete


class Ready:
    """Events behind what the caller's streams do to a batch. Reused: old ones were waited for."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, list[torch.cuda.Event]] = {}

    def record(
        self, parts: list[list[torch.Tensor]], step: int
    ) -> dict[torch.device, torch.cuda.Event]:
        """One event for each GPU that holds part of the batch, on its current stream."""
        events: dict[torch.device, torch.cuda.Event] = {}
        for part in parts:
            for tensor in part:
                device = tensor.device
                if device in events or not tensor.is_cuda:
                    continue
                if device not in self._rings:
                    self._rings[device] = [torch.cuda.Event() for _ in range(2 * RUN_AHEAD)]
                event = events[device] = self._rings[device][step % (2 * RUN_AHEAD)]
                event.record(torch.cuda.current_stream(device))
        return events
