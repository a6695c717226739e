"""How a rank's part of a batch gets to where its graph reads it.

The graph itself copies it there. For each step the host leaves the addresses of the batch in pinned
memory, one slot for each step that it may be ahead, and the graph begins by taking the slot whose
turn it is. So a step that finds its batch complete makes no call of CUDA but the look at the
caller's stream: each is a chance for threads to wait for each other, under Python's lock or the
driver's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trlow.launching import RUN_AHEAD
from trlow.program import Stream
from trlow.torch.rows import GATHER, Table, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.enqueue import Rank
    from trlow.torch.member import Member
    from trlow.torch.payload import Payload

TAKE_TURN = "take_turn"
WORD_NBYTES = 8


class Inputs:
    """Of one rank on a GPU. Everything here is on that rank's own thread.

    What the caller's streams do to a batch comes first. It was enqueued before the step was asked
    for; what was enqueued since is waited for as well, and does not wait for this step itself.
    """

    def __init__(self, rank: Rank, member: Member) -> None:
        """Nothing of the rank is being captured."""
        self._member, self._kernels = member, rank.kernels
        self._kernels.load((GATHER, TAKE_TURN))
        self._caller = rank.events["caller"]
        targets = member.inputs  # their strides are those of the example, without gaps
        self._lies = [(each.device, each.stride()) for each in targets]
        self._count = len(targets)
        places = [each.data_ptr() for each in targets]  # a warm-up copies them to themselves
        self._pinned = torch.tensor([places] * RUN_AHEAD, dtype=torch.int64).pin_memory()
        self._slots = self._pinned.numpy()
        self._brought = 0  # steps, each of which is launched next
        with torch.cuda.device(member.device):
            # The addresses of the step that runs, and how many steps there were before.
            self._now = torch.zeros(self._count + 1, dtype=torch.int64, device=member.device)
            self._tables = [_table(each) for each in targets]
            self._copied = [torch.cuda.Event() for _ in range(RUN_AHEAD)]
            # Torch sets up on its default stream, which no other waits for; steps never use it.
            torch.cuda.current_stream().synchronize()
        self._staging = [[torch.empty_like(each) for each in targets] for _ in range(RUN_AHEAD)]

    def take(self, handle: int) -> None:
        """Enqueue what copies the batch whose turn it is."""
        now = self._now.data_ptr()
        turn, slots = now + WORD_NBYTES * self._count, self._pinned.data_ptr()
        self._kernels.launch(TAKE_TURN, (now, slots, turn, RUN_AHEAD, self._count), 1, handle)
        for index, table in enumerate(self._tables):
            values = (0, 0, now + WORD_NBYTES * index, table.address, table.entries)
            self._kernels.launch(GATHER, values, table.entries, handle)

    def settle(self) -> None:
        """After the captures: the first step takes the first turn."""
        self._now.zero_()

    def bring(self, rank: Rank, payload: Payload) -> None:
        """What a step needs, ahead of its graph. The step two back is complete.

        The next graph that is launched takes it: a run that fails in between takes its graphs with
        it.
        """
        mine: Sequence[torch.Tensor] = payload.shards[rank.index]
        if payload.rates is None and all(map(self._is_near, mine, self._lies)):
            cudart, caller = rank.platform.cudart, payload.callers[self._member.device]
            if cudart.cudaStreamQuery(caller):
                cudart.cudaGetLastError()  # which this is, and torch's next kernel would raise it
                cudart.cudaEventRecord(self._caller, caller)
                cudart.cudaStreamWaitEvent(rank.streams[Stream.UPDATE], self._caller, 0)
        else:
            mine = self._slowly(rank, payload)
        self._slots[self._brought % RUN_AHEAD] = [each.data_ptr() for each in mine]
        self._brought += 1

    @staticmethod
    def _is_near(source: torch.Tensor, lies: tuple[torch.device, tuple[int, ...]]) -> bool:
        """Whether its bytes can be taken as they are."""
        strange = source.is_conj() or source.is_neg()
        return (source.device, source.stride()) == lies and not strange

    def _slowly(self, rank: Rank, payload: Payload) -> Sequence[torch.Tensor]:
        """Whatever torch can copy, into buffers; and learning rates.

        TRANS copies what comes from the host, beside the step before.
        """
        device = self._member.device
        update, trans = (
            stream_of(rank.streams[key], device) for key in (Stream.UPDATE, Stream.TRANS)
        )
        turn = self._brought % RUN_AHEAD
        staging, copied = self._staging[turn], self._copied[turn]
        sources = payload.shards[rank.index]
        with torch.cuda.device(device):
            with torch.cuda.stream(trans):
                for buffer, source in zip(staging, sources, strict=True):
                    if not source.is_cuda:
                        buffer.copy_(source, non_blocking=True)
                copied.record(trans)
            with torch.cuda.stream(update):
                update.wait_event(copied)
                for gpu, caller in payload.callers.items():
                    update.wait_stream(stream_of(caller, gpu))
                for buffer, source in zip(staging, sources, strict=True):
                    if source.is_cuda:
                        buffer.copy_(source, non_blocking=True)
                if payload.rates is not None:
                    self._member.update.set_rates(payload.rates)
        return staging

    def close(self) -> None:
        """Let go of the memory. No graph may be alive."""
        self._staging.clear()
        self._tables.clear()
        self._now = torch.empty(0)


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """A stream of torch; its class for foreign handles takes 0 for a new stream."""
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def _table(target: torch.Tensor) -> Table:
    """Rows of {where it goes, offset in what comes, bytes} for one input."""
    first = target.data_ptr()
    table = Table(target.device, ([at, at - first, size] for at, size in rows([(target,)], 1)))
    table.fill()
    return table
