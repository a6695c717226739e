"""One rank's module, loss and optimizer: the torch work of a step, on whatever device.

Parameters, gradients, running statistics and the loss are views of the rank's arena, so a
collective on a byte range is one on all of them. Nothing here knows streams or graphs.
"""

from __future__ import annotations

import math
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from trlow.errors import UsageError
from trlow.torch.buckets import DTYPES, Bucket, Parameter, gradient, inbox, master, weight
from trlow.torch.update import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from trlow.dtype import DType
    from trlow.torch.batches import BatchShape
    from trlow.torch.work import Work


def plain(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, where ``torch.compile`` has wrapped it."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module


class Member:
    """The module of one rank. Made by the caller's thread, afterwards the rank's own."""

    def __init__(self, rank: int, device: torch.device, work: Work) -> None:
        """Build the module. Raises ``UsageError`` for one that cannot be trained this way."""
        self.rank, self.device, self.work = rank, device, work
        self.forward = work.factory().to(device)
        self.module = plain(self.forward)
        self.module.train()
        for name, part in self.module.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                raise UsageError(
                    f"{name or 'the module'} is a SyncBatchNorm: its collectives are those of "
                    "torch.distributed, which has no process group here; use BatchNorm, whose "
                    "running statistics are averaged over the ranks"
                )
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.update = Update(work, list(self.trainable.values()), device)
        self.order: list[str] = []  # of the newest backward: names as gradients became ready
        self.on_bucket: Callable[[int], None] | None = None  # told when a bucket is ready
        self.probing = False  # a parameter becomes NaN when its gradient is ready
        self.buckets: tuple[Bucket, ...] = ()
        self.inputs: list[torch.Tensor] = []
        self._waiting: list[int] = []
        self._bucket_of: dict[str, int] = {}
        self.steady: frozenset[str] = frozenset()  # gradients that lie as their parameters do
        self.draws = False  # whether a step draws random numbers
        self.side: torch.cuda.Stream | None = None  # on a GPU: where its steps are captured
        self._gathered: list[list[torch.nn.Parameter]] = []  # by bucket: not sent directly
        self._reduced: list[list[torch.Tensor]] = []  # by bucket: views that are reduced
        self._grads: list[list[torch.Tensor]] = []  # by bucket: views that the optimizer reads
        self.inboxes: dict[torch.Tensor, torch.Tensor] = {}  # of the peer's gradients
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_telling(weakref.ref(self), name))
            for name, parameter in self.trainable.items()
        ]

    def parameters(self) -> list[Parameter]:
        """The trainable parameters as the plan sees them."""
        found = []
        for name, p in self.trainable.items():
            if p.dtype not in DTYPES:
                raise UsageError(f"parameter {name} is {p.dtype}; known are {list(DTYPES)}")
            found.append(Parameter(name, p.numel(), DTYPES[p.dtype]))
        return found

    def statistics(self) -> dict[str, int]:
        """Running means and variances of batch norms, and their elements."""
        return {name: buffer.numel() for name, (_, _, buffer) in self._statistics().items()}

    def _statistics(self) -> dict[str, tuple[_NormBase, str, torch.Tensor]]:
        found = {}
        for prefix, part in self.module.named_modules():
            if not isinstance(part, _NormBase):
                continue
            for key in ("running_mean", "running_var"):
                buffer = getattr(part, key)
                if isinstance(buffer, torch.Tensor) and buffer.dtype is torch.float32:
                    found[f"{prefix}.{key}"] = (part, key, buffer)
        return found

    # -- memory

    def adopt(
        self,
        view: Callable[[str], torch.Tensor],
        buckets: tuple[Bucket, ...],
        wire: DType | None,
        *,
        copies: bool = False,
        direct: Collection[str] = (),
    ) -> None:
        """Move into the arena; ``view(name)`` is a tensor of the plan, flat."""
        self.buckets = buckets
        self._bucket_of = {name: k for k, bucket in enumerate(buckets) for name in bucket.names}
        widened = wire is not None
        self._gathered, self._reduced, self._grads = [], [], []
        for bucket in buckets:
            for name in bucket.names:
                parameter = self.trainable[name]
                place = _like(view(weight(name)), parameter)
                place.copy_(parameter.detach())
                parameter.data = place
            mine = {name: self.trainable[name] for name in bucket.names if name not in direct}
            reduced = [_like(view(gradient(name)), p) for name, p in mine.items()]
            self._gathered.append(list(mine.values()))
            self._reduced.append(reduced)
            self._grads.append(
                [_like(view(master(name)), p) for name, p in mine.items()]
                if widened and bucket.dtype is DTYPES[torch.float32]
                else reduced
            )
        if copies:
            self.inboxes = {p: _like(view(inbox(name)), p) for name, p in self.trainable.items()}
        for name, (part, key, buffer) in self._statistics().items():
            place = view(name).view(buffer.shape)
            place.copy_(buffer)
            part._buffers[key] = place
        self.loss = view("loss")

    def leave(self) -> None:
        """Move out of the arena, into memory of its own."""
        for parameter in self.trainable.values():
            parameter.grad = None
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        for part, key, buffer in self._statistics().values():
            part._buffers[key] = buffer.clone()
        self._reduced, self._grads, self.inputs, self.inboxes = [], [], [], {}
        self.loss = torch.empty(0)
        self.update.forget()

    def close(self) -> None:
        """The module goes on as the caller's own, without hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def restart(self, state: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """As before whatever was measured: this state, this optimizer's, no gradients."""
        self.put(state)
        self.update.restart(history)
        with torch.no_grad():
            for views in filter(None, self._reduced):
                torch._foreach_zero_(views)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, the tensors themselves."""
        return self.module.state_dict(keep_vars=False)

    def put(self, state: dict[str, Any]) -> None:
        """Copy a state dict into the tensors that are there. Raises ``UsageError``."""
        mine = self.state()
        if mine.keys() != state.keys():
            wrong = sorted(mine.keys() ^ state.keys())[:5]
            raise UsageError(f"the state dict differs from the module's: {', '.join(wrong)}")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                shapes = tuple(state[name].shape), tuple(tensor.shape)
                raise UsageError(f"{name}: the state dict has {shapes[0]}, not {shapes[1]}")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])

    # -- the work of a step

    def ready(self, name: str) -> None:
        """On autograd's thread: the gradient of one parameter is complete."""
        self.order.append(name)
        if self.probing:
            with torch.no_grad():
                self.trainable[name].fill_(math.nan)
        if self._waiting:
            bucket = self._bucket_of[name]
            self._waiting[bucket] -= 1
            if self._waiting[bucket] == 0 and self.on_bucket is not None:
                self.on_bucket(bucket)

    def forward_backward(self, shape: BatchShape, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Leave gradients in ``.grad``; returns the loss, detached."""
        loss = self.run_forward(shape, inputs)
        self.run_backward(loss)
        return loss.detach()

    def run_forward(self, shape: BatchShape, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The loss, a scalar with the graph of autograd behind it."""
        self.order = []
        self._waiting = [len(bucket.names) for bucket in self.buckets]
        for parameter in self.trainable.values():
            parameter.grad = None  # so that autograd hands its own tensor over and adds nothing
        dtype = self.work.autocast
        cast = torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()
        with torch.enable_grad(), cast:
            loss = self.work.loss_fn(self.forward, shape.build(inputs))
        shape_of = getattr(loss, "shape", None)
        if shape_of is None or loss.numel() != 1:
            got = type(loss).__name__ if shape_of is None else tuple(shape_of)
            raise UsageError(f"loss_fn must return a scalar tensor, it returned {got}")
        return loss

    def run_backward(self, loss: torch.Tensor) -> None:
        """Leave gradients in ``.grad``."""
        # What autograd starts from carries 1 / ranks and the loss scale, so that the sum over ranks
        # is the mean and no kernel has to scale it.
        torch.autograd.backward(loss, self.update.seed.to(loss.dtype).view(loss.shape))
        missing = [name for name, p in self.trainable.items() if p.grad is None]
        if missing:
            raise UsageError(
                f"{len(missing)} parameters got no gradient, {', '.join(missing[:5])} among them: "
                "call requires_grad_(False) on what the loss does not use"
            )

    def keep_loss(self, loss: torch.Tensor) -> None:
        """Put the loss where it is reduced."""
        self.loss.copy_(loss.view(1))

    def pieces(self, bucket: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where gradients of one bucket are reduced, and where autograd has left them."""
        mine = self._gathered[bucket]
        grads = [parameter.grad for parameter in mine if parameter.grad is not None]
        return self._reduced[bucket], grads

    def gather(self, bucket: int) -> None:
        """Gradients of one bucket into its byte range: one multi-tensor kernel."""
        reduced, grads = self.pieces(bucket)
        with torch.no_grad():
            if self.work.accumulate > 1:
                torch._foreach_add_(reduced, grads)
            else:
                torch._foreach_copy_(reduced, grads)

    def hand_over(self, bucket: int) -> None:
        """Gathered gradients of one bucket to where the optimizer reads them, and into ``.grad``.

        They are sums over the ranks, except where the optimizer's kernel adds: there a rank's own.
        """
        reduced, grads = self._reduced[bucket], self._grads[bucket]
        if grads is not reduced:
            with torch.no_grad():
                torch._foreach_copy_(grads, reduced)
        for parameter, grad in zip(self._gathered[bucket], grads, strict=True):
            parameter.grad = grad

    def clear(self, bucket: int) -> None:
        """Where gradients are added up over several steps they begin at 0."""
        if self.work.accumulate > 1 and self._reduced[bucket]:
            with torch.no_grad():
                torch._foreach_zero_(self._reduced[bucket])

    def gradients(self, bucket: int) -> dict[torch.Tensor, torch.Tensor]:
        """Where the optimizer reads the gradient of each gathered parameter of one bucket."""
        return dict(zip(self._gathered[bucket], self._grads[bucket], strict=True))

    def direct(self, bucket: int) -> list[torch.nn.Parameter]:
        """The others, whose gradient stays where autograd leaves it."""
        mine = [self.trainable[name] for name in self.buckets[bucket].names]
        return [each for each in mine if all(each is not other for other in self._gathered[bucket])]

    @property
    def scales(self) -> bool:
        """Whether something needs all gradients, summed, before the first weight changes."""
        return self.work.clip_norm is not None or self.work.autocast is torch.float16

    def apply(self, take: Callable[[], None] | None = None) -> None:
        """One optimizer step with the reduced gradients: ``take``, or that of the optimizer."""
        numbers = range(len(self.buckets))
        for bucket in numbers:
            self.hand_over(bucket)
        self.update.step([grad for grads in self._grads for grad in grads], take)
        for bucket in numbers:
            self.clear(bucket)


def replicas(places: Sequence[torch.device], work: Work) -> list[Member]:
    """One member for each place, all with the state of the first."""
    members = [Member(rank, place, work) for rank, place in enumerate(places)]
    for member in members[1:]:
        member.put(members[0].state())
    return members


def _telling(member: weakref.ref[Member], name: str) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep its member: Python's collector cannot see cycles through hooks."""

    def tell(_: torch.Tensor) -> None:
        mine = member()
        if mine is not None:
            mine.ready(name)

    return tell


def _like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of ``flat`` with the shape of ``parameter``, and its strides if those are dense."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())
