"""How a rank's part of a batch gets to where its graph reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trlow.launching import RUN_AHEAD
from trlow.program import Stream

if TYPE_CHECKING:
    from trlow.enqueue import Rank
    from trlow.torch.member import Member
    from trlow.torch.payload import Payload

DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


class Inputs:
    """Of one rank on a GPU. Everything here is on that rank's own thread.

    What the caller's streams do to a batch comes first. It was enqueued before the step was asked
    for; what was enqueued since is waited for as well, and does not wait for this step itself.
    """

    def __init__(self, rank: Rank, member: Member) -> None:
        self._member = member
        self._caller = rank.events["caller"]
        # Where the graph reads its inputs. Their strides are those of the example, without gaps.
        self._targets = [
            (each.data_ptr(), each.nbytes, each.device, each.stride()) for each in member.inputs
        ]
        self._staging = [
            [torch.empty_like(tensor) for tensor in member.inputs] for _ in range(RUN_AHEAD)
        ]
        with torch.cuda.device(member.device):
            self._copied = [torch.cuda.Event() for _ in range(RUN_AHEAD)]

    def bring(self, rank: Rank, step: int, payload: Payload) -> None:
        """The inputs of a step, on UPDATE ahead of the graph.

        A tensor on this GPU that lies as the graph's input does is copied by one call of CUDA;
        torch's own copy, in a context of its own, costs the host five times as much.
        """
        mine, targets = payload.shards[rank.index], self._targets
        if payload.rates is not None or any(
            source.device != device or source.stride() != stride or source.is_conj()
            for source, (_, _, device, stride) in zip(mine, targets, strict=True)
        ):
            self._slowly(rank, step, payload)
            return
        cudart, stream = rank.platform.cudart, rank.streams[Stream.UPDATE]
        caller = payload.callers[self._member.device]
        if cudart.cudaStreamQuery(caller):
            cudart.cudaEventRecord(self._caller, caller)
            cudart.cudaStreamWaitEvent(stream, self._caller, 0)
        for source, (target, nbytes, _, _) in zip(mine, targets, strict=True):
            cudart.cudaMemcpyAsync(target, source.data_ptr(), nbytes, DEVICE_TO_DEVICE, stream)

    def _slowly(self, rank: Rank, step: int, payload: Payload) -> None:
        """Whatever torch can copy. What comes from the host goes through a buffer of its own.

        TRANS fills that beside the step before. The step two back has read it by now: the bounded
        run-ahead has waited for it.
        """
        member, mine = self._member, payload.shards[rank.index]
        update, trans = (
            torch.cuda.ExternalStream(rank.streams[key], device=member.device)
            for key in (Stream.UPDATE, Stream.TRANS)
        )
        staging, copied = self._staging[step % RUN_AHEAD], self._copied[step % RUN_AHEAD]
        with torch.cuda.device(member.device):
            with torch.cuda.stream(trans):
                for target, source in zip(staging, mine, strict=True):
                    if not source.is_cuda:
                        target.copy_(source, non_blocking=True)
                copied.record(trans)
            with torch.cuda.stream(update):
                update.wait_event(copied)
                for device, caller in payload.callers.items():
                    update.wait_stream(torch.cuda.ExternalStream(caller, device=device))
                for target, buffer, source in zip(member.inputs, staging, mine, strict=True):
                    target.copy_(source if source.is_cuda else buffer, non_blocking=True)
                if payload.rates is not None:
                    member.update.set_rates(payload.rates)

    def close(self) -> None:
        """Let go of the buffers."""
        self._staging.clear()
