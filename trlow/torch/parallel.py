"""``StaticDataParallel``: a torch module trained by one graph launch per GPU and step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from trlow.device import Platform
from trlow.errors import TrlowError, UsageError
from trlow.settings import Settings
from trlow.torch.batches import BatchShape
from trlow.torch.blame import blamed
from trlow.torch.blueprint import draw
from trlow.torch.captured import Captured
from trlow.torch.cuda import CudaSide
from trlow.torch.draws import undrawn
from trlow.torch.host import HostSide
from trlow.torch.loss import Loss
from trlow.torch.member import replicas
from trlow.torch.payload import Payload, callers
from trlow.torch.peers import ranks_copy
from trlow.torch.rates import Rates
from trlow.torch.stages import step_program
from trlow.torch.update import copied
from trlow.torch.views import tensor_of
from trlow.torch.work import Factory, LossFunction, OptimizerFactory, Wishes, Work
from trlow.transport import transport_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trlow.enqueue import Rank
    from trlow.stepping import Stepper
    from trlow.torch.member import Member

BUCKET_NBYTES = 25 << 20


class StaticDataParallel:
    """A replica of a module on every rank, whose step is captured once and replayed.

    What is static is checked: shapes and dtypes of the batch, the parameters that get a gradient,
    the order in which they get it. A step may not allocate outside of torch or wait for the device.
    It draws the random numbers (dropout) that it would draw without a capture, from the generator
    of its rank's GPU. Used by one thread; a context manager.
    """

    def __init__(
        self,
        factory: Factory,
        loss_fn: LossFunction,
        settings: Settings | None = None,
        *,
        optimizer: OptimizerFactory,
        buckets: int | Sequence[Sequence[str]] | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        autocast: torch.dtype | None = None,
        wire: torch.dtype | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        statistics: str = "mean",
        exchange: str = "auto",
    ) -> None:
        """Build a module and an optimizer for each rank; all get rank 0's weights.

        ``factory()`` returns a module, ``loss_fn(module, batch)`` a scalar, ``optimizer(params)``
        an optimizer with ``fused=True`` or ``capturable=True`` on GPUs. ``buckets`` is a number,
        lists of parameter names, or None: of ``bucket_nbytes``, the first and last small.
        ``autocast`` is torch.bfloat16 or torch.float16 (with a loss scale on the device), ``wire``
        the dtype in which float32 gradients are reduced. Every ``accumulate``-th step updates, with
        gradients averaged over those steps. ``clip_norm`` is the largest global norm of a gradient.
        ``statistics`` says what becomes of running batch-norm statistics: "mean" over ranks after
        each batch, or those of "rank0". ``exchange`` says how gradients are summed: "nccl" by its
        all-reduce, "copy" by copy engines and a kernel (two ranks; where that is the kernel of the
        step ``.grad`` is a rank's own share), "auto" so on two GPUs. Copies go the way that
        ``settings.transport`` says. Raises ``UsageError``, ``SettingsError``, ``LibraryError``.
        """
        self.settings = settings or Settings()
        self._wishes = Wishes(buckets, bucket_nbytes, wire, statistics)
        self._platform = Platform.open(self.settings)
        devices = self.settings.devices(self._platform.device_count())
        kind = "cpu" if self._platform.name == "host" else "cuda"
        self.world_size = len(devices)
        work = Work(factory, loss_fn, optimizer, autocast, accumulate, clip_norm, self.world_size)
        self._transport = transport_name(self.settings.transport, self._platform, devices)
        given = self._platform, devices, self.settings.arena, self._transport
        self._copies = ranks_copy(exchange, *given)
        places = [torch.device(kind, 0 if kind == "cpu" else device) for device in devices]
        self._members = replicas(places, work)
        self._work = work
        self._rates = Rates(self._members[0].update.rates)
        self._captured: Captured | None = None
        self._shape: BatchShape | None = None
        self._steps = 0
        self._closed = False

    @property
    def exchange(self) -> str:
        """How gradients are summed over ranks: "nccl" or "copy"."""
        return "copy" if self._copies else "nccl"

    @property
    def transport(self) -> str | None:
        """How they are copied: "peer" over a link, "host" through its memory, None by NCCL."""
        return self._transport if self._copies else None

    # -- compile

    def compile(self, example_batch: Any) -> None:
        """Measure, plan, warm up and capture for batches like this one.

        Weights, running statistics, random generators and the optimizer's history stay as they
        are. The first dimension of each tensor counts the rows of all ranks. Called again after a
        failed step it captures anew. Raises ``UsageError``, ``CaptureError``, ``RankError``, with
        nothing left behind.
        """
        self._check_open()
        shape = BatchShape(example_batch, self.world_size)
        self._drop()
        state = copied(self._members[0].state())
        history = self._members[0].update.history()
        try:
            with undrawn(member.device for member in self._members):
                self._build(shape, example_batch, state, history)
            self._shape = shape
        except BaseException as error:
            rank = getattr(error, "rank", None) or 0
            blamed(error, self._members[rank].module)
            try:
                self._drop()
                for member in self._members:
                    member.restart(state, history)
            except TrlowError as second:
                error.add_note(f"while giving memory back: {second}")
            raise

    def _build(
        self, shape: BatchShape, example: Any, state: dict[str, Any], history: list[dict[str, Any]]
    ) -> None:
        members, platform = self._members, self._platform
        shards = shape.cut(example)
        on_host, wishes = platform.name == "host", self._wishes
        captured = self._captured = Captured(platform, members)
        drawn = draw(members, shape, shards, wishes, transport=self.transport, on_host=on_host)
        plan, course = drawn.plan, drawn.course

        def adopt(rank: Rank) -> CudaSide | HostSide:
            member = members[rank.index]
            member.inputs = [leaf.to(member.device, copy=True) for leaf in shards[rank.index]]
            drawn.move_in(member, partial(tensor_of, rank.arena))
            if on_host:
                return HostSide(rank, member, shape)
            return CudaSide(rank, member, shape, course)

        captured.open(replace(self.settings, transport=self._transport), plan, adopt)
        ends = (True, False) if self._work.accumulate > 1 else (True,)
        given = plan, captured.sides, course, wishes.statistics
        programs = [step_program(*given, last=last) for last in ends]
        captured.capture(programs, draws=course.draws)
        self._each(lambda member: member.restart(state, history))
        self._rates.forget()  # a step that failed may not have brought every rank its rates
        self._steps = 0

    # -- steps

    def step(self, batch: Any = None, *, shards: Any = None) -> Loss:
        """Train on one batch, or on one batch of each rank as ``shards``. Returns at once.

        At most two steps are waiting for the devices; a batch may not be written to before two
        further calls or ``synchronize``. A step waits for what the current streams of the GPUs that
        hold its batch have to do; ``synchronize`` before one of them is captured or goes.

        Raises ``UsageError`` for a batch unlike the example, and what an earlier step has failed
        with; after that ``compile`` captures anew.
        """
        shape, stepper = self._ready()
        if (batch is None) == (shards is None):
            raise UsageError("step() takes a batch, or shards=[...], one batch for each rank")
        parts = shape.cut(batch) if shards is None else shape.given(shards)
        self._steps += 1
        which = 0 if self._steps % self._work.accumulate == 0 else 1
        payload = Payload(parts, self._rates.changed(), callers(parts), which)
        result = stepper.step(payload, which)
        return Loss(result, self.world_size)

    def synchronize(self) -> None:
        """Wait for every step. Raises what one has failed with."""
        if self._captured is not None:
            self._captured.synchronize()

    def _ready(self) -> tuple[BatchShape, Stepper]:
        self._check_open()
        stepper = None if self._captured is None else self._captured.stepper
        if self._shape is None or stepper is None:
            raise UsageError("call compile(example_batch) first; after a failed step, again")
        return self._shape, stepper

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("closed; make a new StaticDataParallel")

    # -- state

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """For torch's learning-rate schedules: one group for each of the real optimizer's.

        A learning rate that is set here counts from the next step on. It holds no parameter.
        """
        return self._rates.optimizer

    @property
    def module(self) -> torch.nn.Module:
        """Rank 0's module after every step so far. Its tensors change with the next step."""
        self.synchronize()
        return self._members[0].module

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Every rank's module, to look at; they hold the same weights."""
        self.synchronize()
        return tuple(member.module for member in self._members)

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's state, copied; interchangeable with that of the plain module."""
        self.synchronize()
        return copied(self._members[0].state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state dict to every rank. Raises ``UsageError`` for one of another module."""
        self.synchronize()
        self._each(lambda member: member.put(state))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The state of rank 0's optimizer, copied, with the learning rates that count."""
        self.synchronize()
        return self._members[0].update.state(self._rates.now())

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Copy an optimizer's state to every rank; after ``compile``, which makes it."""
        self._ready()
        self.synchronize()
        for side in () if self._captured is None else self._captured.sides:
            side.check_history(state)
        self._each(lambda member: member.update.put(state))
        self._rates.set([float(group["lr"]) for group in state["param_groups"]])

    def _each(self, function: Callable[[Member], None]) -> None:
        """For every rank, on its own thread where there is one."""
        if self._captured is not None:
            self._captured.each(function)
            return
        for member in self._members:
            function(member)

    # -- end

    def _drop(self) -> None:
        """Everything that compile() made; the modules live on in memory of their own."""
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.close()

    def close(self) -> None:
        """Wait for every step and give everything back. A second call does nothing.

        ``module`` and ``state_dict`` go on working. A step that has failed is a warning here.
        """
        if not self._closed:
            self._drop()
            for member in self._members:
                member.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
