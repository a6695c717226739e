"""A rank's torch work on a GPU: enqueued on trlow's streams, so that a capture records it.

Everything runs on the rank's own thread, first in the warm-up and then in the capture, because what
torch keeps per thread (handles and workspaces of cuBLAS, cuDNN's choice of algorithms) has to be
there before the capture. Kernels of the backward are enqueued by autograd's own thread of the
device, onto the stream of the forward.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trlow.errors import UsageError
from trlow.program import Stream
from trlow.torch.course import Course, is_covered
from trlow.torch.draws import Draws
from trlow.torch.fused import KERNELS, FusedStep, counts_one_step
from trlow.torch.inputs import Inputs, stream_of
from trlow.torch.rows import GATHER, Table, alike, rows

BESIDE_BLOCKS = 64  # of a gather that has the rest of the backward beside it
EARLY_BLOCKS = 128  # of an update that has

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trlow.enqueue import Rank
    from trlow.torch.batches import BatchShape
    from trlow.torch.member import Member
    from trlow.torch.payload import Payload


class CudaSide:
    """The torch work of one rank, enqueued on streams of its GPU."""

    overlaps = True  # a bucket is reduced while the backward goes on

    def __init__(self, rank: Rank, member: Member, shape: BatchShape, course: Course) -> None:
        """On the rank's own thread; ``course`` is the same on all ranks."""
        self._platform, self._kernels = rank.platform, rank.kernels
        self._kernels.load((GATHER, *KERNELS))
        self.member = member
        self._shape = shape
        self._index = member.device.index
        self._streams: dict[int, torch.cuda.Stream] = {}
        with torch.cuda.device(self._index):
            pool = torch.cuda.MemPool()
            # Without timing; an event is made by its first record, which is in the warm-up.
            self._ready = [torch.cuda.Event() for _ in member.buckets]
            self._computed, self._gathered = torch.cuda.Event(), torch.cuda.Event()
        self._inputs = Inputs(rank, member)
        self._tables: list[Table] = []  # of captured kernels, filled behind the capture
        self._spare: list[Table] = []  # of the warm-up
        self._pool: torch.cuda.MemPool | None = pool
        self._draws = Draws(rank, member.device, pool) if course.draws else None
        rank.recorder = self._draws
        self._base, self._transport = rank.arena.base, rank.transport
        self._fused = self._fused_step(course) if course.fused else None
        member.on_bucket = self._mark

    def _mark(self, bucket: int) -> None:
        """On autograd's thread, whose current stream is that of the forward."""
        self._ready[bucket].record()

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle not in self._streams:
            self._streams[handle] = stream_of(handle, self.member.device)
        return self._streams[handle]

    @contextmanager
    def _on(self, handle: int) -> Iterator[torch.cuda.Stream]:
        """Torch enqueues on this stream and allocates from a pool that is the graphs' own.

        A graph uses the addresses of its capture in every replay. From the common pool torch would
        hand them out again to whoever asks next. The pool takes the allocations of all threads on
        this GPU, not of the caller's alone, because those of the backward are autograd's. While it
        does, torch does not look at events of freed blocks either, a look that ends a capture.
        """
        pool, index, stream = self._pool, self._index, self._stream(handle)
        if pool is None:
            message = "the pool is closed"
            raise RuntimeError(message)
        with torch.cuda.device(index), torch.cuda.stream(stream):
            if self._draws is not None and self._draws.recording:
                yield stream  # the pool takes what belongs to this capture
                return
            torch._C._cuda_beginAllocateToPool(index, pool.id)
            try:
                yield stream
            finally:
                torch._C._cuda_endAllocateToPool(index, pool.id)
                torch._C._cuda_releasePool(index, pool.id)

    def compute(self, handle: int) -> None:
        """Inputs, forward and backward; each bucket that is ready leaves an event behind."""
        member = self.member
        with self._on(handle) as stream:
            self._inputs.take(handle)
            member.keep_loss(member.forward_backward(self._shape, member.inputs))
            self._computed.record(stream)

    def gather(self, bucket: int, handle: int) -> None:
        """The gradients of one bucket, behind its event and beside the rest of the backward.

        Their memory is the forward's stream's, on which a capture allocates nothing behind COMPUTE,
        so no other tensor of this step gets it although this stream still reads it.
        """
        with self._on(handle) as stream:
            stream.wait_event(self._ready[bucket])
            pairs = list(zip(*self.member.pieces(bucket), strict=True))
            if self.member.work.accumulate == 1 and all(map(alike, pairs)):
                table = self._table(rows(pairs, 1))
                blocks = table.entries if self._is_last(bucket) else BESIDE_BLOCKS
                self._gather(table, min(table.entries, blocks), handle)
            else:
                self.member.gather(bucket)
            self._gathered.record(stream)

    def _gather(self, table: Table, blocks: int, handle: int) -> None:
        """The copies that a table holds, as one kernel.

        With few blocks where the backward's kernels want the multiprocessors.
        """
        self._kernels.launch(GATHER, (0, 0, 0, table.address, table.entries), blocks, handle)

    def _table(self, found: Iterator[list[int]]) -> Table:
        """A table that is filled; in a capture, that will be.

        A capture takes one of its warm-up. Memory that it allocated itself may be what a kernel
        ahead of it uses for something passing, which every replay would write over the table.
        """
        if not torch.cuda.is_current_stream_capturing():
            table = Table(self.member.device, found)
            table.fill()
            self._spare.append(table)
            return table
        wanted = torch.tensor(list(found), dtype=torch.int64)
        for spare in self._spare:
            if spare.takes(wanted):
                self._spare.remove(spare)
                self._tables.append(spare)
                return spare
        raise UsageError(
            f"a capture has {len(wanted)} pieces of memory to work on, which no table of its "
            "warm-up holds: the module's gradients lie in memory in another way each time, and a "
            "graph needs one"
        )

    def send(self, bucket: int, handle: int) -> None:
        """Direct gradients of one bucket, behind its event, to the peer's inboxes.

        Copy engines leave the multiprocessors to the backward, but take some microseconds from one
        copy to the next. Where nothing of the backward is left one kernel that can sends them all.
        """
        way, inboxes = self._transport, self.member.inboxes
        with self._on(handle) as stream:
            stream.wait_event(self._ready[bucket])
            sent = [(inboxes[p], grad) for p, grad in self._direct(bucket).items()]
            if way.writable and way.next is not None and self._is_last(bucket):
                far = way.next.base - self._base
                table = self._table([to + far, *rest] for to, *rest in rows(sent, 1))
                self._gather(table, table.entries, handle)
                return
            for inbox, grad in sent:
                place = inbox.data_ptr() - self._base
                way.copy(place, grad.data_ptr(), grad.nbytes, handle)

    def _is_last(self, bucket: int) -> bool:
        """The last to be ready, unless the caller has named buckets in another order."""
        return bucket == len(self.member.buckets) - 1

    def _direct(self, bucket: int) -> dict[torch.Tensor, torch.Tensor]:
        """Gradients where autograd has left them."""
        mine = self.member.direct(bucket)
        found: dict[torch.Tensor, torch.Tensor] = {p: p.grad for p in mine if p.grad is not None}
        if not all(alike(pair) for pair in found.items()):
            raise UsageError(
                "a gradient lies in memory otherwise than in the step that was measured: the "
                "module computes its gradients in another way now; use exchange='nccl'"
            )
        return found

    def settle(self) -> None:
        """After the captures: their kernels read tables that only now may be filled."""
        for table in self._tables:
            table.fill()
        self._spare.clear()
        self._inputs.settle()
        if self._draws is not None:
            self._draws.settle()

    def _fused_step(self, course: Course) -> FusedStep:
        member = self.member
        if not is_covered(member):
            raise UsageError("the optimizer has changed since the step was measured")
        inboxes = member.inboxes if course.adds else None
        return FusedStep(self._kernels, member.update.optimizer, self._table, inboxes)

    def check_history(self, state: dict[str, Any]) -> None:
        """Raise ``UsageError`` for an optimizer state that the captured step cannot go on with."""
        if self._fused is not None and not counts_one_step(state["state"].values()):
            raise UsageError(
                "this state counts unequal steps for its parameters, and the kernel of the step "
                "takes one number; make the optimizer without fused=True"
            )

    def _take(self, handle: int) -> None:
        """The step of every bucket."""
        assert self._fused is not None
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in range(len(self.member.buckets)):
            gradients |= self.member.gradients(bucket) | self._direct(bucket)
        self._fused(gradients, handle, counts=True)

    def apply(self, handle: int) -> None:
        """The optimizer step. The warm-up has no other order than these two events."""
        with self._on(handle) as stream:
            stream.wait_event(self._computed)
            stream.wait_event(self._gathered)
            self.member.apply(None if self._fused is None else lambda: self._take(handle))

    def apply_early(self, bucket: int, handle: int, *, beside: bool) -> None:
        """The optimizer step of one bucket, ``beside`` the backward or behind it."""
        assert self._fused is not None
        with self._on(handle) as stream:
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_event(self._computed)  # the warm-up has no other order than these two
                stream.wait_event(self._gathered)
            self.member.hand_over(bucket)
            gradients, blocks = self.member.gradients(bucket), EARLY_BLOCKS if beside else None
            self._fused(gradients, handle, counts=bucket == 0, blocks=blocks)
            self.member.clear(bucket)

    def before(self, rank: Rank, payload: Payload) -> None:
        """The inputs of a step and its random numbers, ahead of the graph."""
        self._inputs.bring(rank, payload)
        if self._draws is not None:
            self._draws.count(payload.replay)

    def alone(self, rank: Rank, function: Callable[[], None]) -> None:
        """Run torch work outside of any step; it is complete on return."""
        # After a capture that failed, the next check of a launch would find that old error.
        self._platform.cudart.cudaGetLastError()
        update = self._stream(rank.streams[Stream.UPDATE])
        with torch.cuda.device(self._index), torch.cuda.stream(update):
            function()
        update.synchronize()

    def check(self) -> None:
        """Nothing is kept back: what fails on a GPU ends the run."""

    def close(self) -> None:
        """Give the memory back to the GPU. No graph may be alive. On the rank's own thread."""
        self.member.on_bucket = None
        for parameter in self.member.trainable.values():
            parameter.grad = None
        self._inputs.close()
        if self._draws is not None:
            self._draws.close()
        self._tables.clear()
        self._spare.clear()
        self._fused = None
        self._streams.clear()
        self._pool = None
        with torch.cuda.device(self._index):
            # cuBLAS keeps a workspace for each of the streams, which are about to go.
            torch._C._cuda_clearCublasWorkspaces()
            gc.collect()
            torch.cuda.empty_cache()
