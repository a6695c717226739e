"""One model, one dataset, all ranks: compile, fit, validate, report.

A task checks everything it can before a device is opened. It owns the runtime; leaving the `with`
block, or `close`, gives everything back. Every number that changes while training reaches the
device in an input slot; nothing is baked into a graph.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trlow.batches import Batches, check_data, epoch_order
from trlow.data import Dataset
from trlow.device import Platform
from trlow.errors import SettingsError, TrlowError, UsageError
from trlow.nn.compiler import Compiled, compile_model
from trlow.nn.initial import initial_state
from trlow.nn.layers import BatchNorm, Sequential
from trlow.region import CNN_TABLE, RegionTable
from trlow.replay import Replay
from trlow.report import Epoch, Metrics, Progress, run_report
from trlow.runtime import Runtime
from trlow.schedule import Schedule, Training, check_count
from trlow.settings import Settings

GLOBAL_BATCH_SIZE = 128


class Task:
    """A model with its data and devices.

    Raises SettingsError, DataError and ModelError at once, before any device is opened.
    """

    def __init__(
        self,
        settings: Settings,
        model: Sequential,
        train: Dataset,
        validation: Dataset,
        *,
        training: Training | None = None,
        name: str = "model",
        frozen: Collection[int] = (),
        table: RegionTable = CNN_TABLE,
    ) -> None:
        """`name` is the model's in the report; `settings` without a batch size get 128."""
        if settings.global_batch_size is None:
            settings = replace(settings, global_batch_size=GLOBAL_BATCH_SIZE)
        self.settings = settings
        self.model = model
        self.train = train
        self.validation = validation
        self.training = training or Training()
        self.name = name
        self.frozen = tuple(frozen)
        self.table = table
        self.history: list[Epoch] = []
        self._compiled: Compiled | None = None
        self._runtime: Runtime | None = None
        self.replays: dict[str, Replay] = {}  # by the name of the program
        self._closed = False
        self._dead = False
        check_data(train, validation, self.global_batch_size, model.classes(train.shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except TrlowError:
            if error is None:
                raise  # the body's own error wins over one from closing

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all ranks."""
        return self.settings.global_batch_size or GLOBAL_BATCH_SIZE

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches of the training rows."""
        return self.train.rows // self.global_batch_size

    @property
    def dropped_rows(self) -> int:
        """Training rows that an epoch leaves out: those of the short last batch."""
        return self.train.rows % self.global_batch_size

    @property
    def compiled(self) -> Compiled:
        """The compiled model. Raises UsageError before `compile`."""
        if self._compiled is None:
            raise UsageError("the task is not compiled: call compile() first")
        return self._compiled

    @property
    def runtime(self) -> Runtime:
        """The running ranks. Raises UsageError before `compile` and after `close`."""
        if self._runtime is None:
            raise UsageError("the task has no ranks: call compile() first, and not after close()")
        return self._runtime

    @property
    def dead(self) -> bool:
        """Whether ranks hung beyond recovery, so that only the end of the process helps."""
        return self._dead if self._runtime is None else self._runtime.dead

    def compile(self) -> Compiled:
        """Plan, open the devices, capture every program, and give all ranks the initial state."""
        if self._closed:
            raise UsageError("the task is closed: make a new one")
        if self._compiled is not None:
            raise UsageError("the task is compiled already: make a new one for other settings")
        platform = Platform.open(self.settings)
        world_size = len(self.settings.devices(platform.device_count()))
        compiled = compile_model(
            self.model,
            input_shape=self.train.shape,
            local_batch=self.settings.local_batch_size(world_size),
            world_size=world_size,
            optimizer=self.training.optimizer,
            frozen=self.frozen,
            table=self.table,
            mean_strategy=self.training.mean_strategy,
        )
        self._runtime = Runtime(self.settings, compiled.plan, platform=platform)
        try:
            for name, program in compiled.programs.items():
                self.replays[name] = self._runtime.capture(program, self.training.replay)
            self._compiled = compiled
            self._initialise()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return compiled

    def fit(self, epochs: int, progress: Callable[[Progress], None] | None = None) -> list[Epoch]:
        """Train for some epochs, validating after each; return these epochs.

        The schedule spans this call. Raises SettingsError for bad counts, and TrlowError when no
        step of an epoch had a finite loss and finite gradients.
        """
        check_count("epochs", epochs, 1)
        if self.training.warmup_epochs > epochs:
            raise SettingsError(
                f"warm-up of {self.training.warmup_epochs} epochs is longer than the "
                f"{epochs} epochs to train: shorten it or train longer"
            )
        if self._compiled is None:
            self.compile()
        schedule = Schedule(
            self.training.schedule,
            self.training.lr,
            epochs * self.steps_per_epoch,
            self.training.warmup_epochs * self.steps_per_epoch,
        )
        for index in range(epochs):
            epoch = self._epoch(schedule, index, self._ticker(progress, index, epochs))
            self.history.append(epoch)
            if progress is not None:
                steps = self.steps_per_epoch
                progress(Progress(index + 1, epochs, steps, steps, epoch))
        return self.history[-epochs:]

    def validate(self) -> Metrics:
        """Metrics over every validation row, with the running batch-norm statistics."""
        compiled = self.compiled
        world_size, local_batch = compiled.world_size, compiled.network.local_batch
        batches = Batches(
            self.validation,
            np.arange(self.validation.rows),
            world_size,
            local_batch,
            self._scalars(metric_scale=float(local_batch)),
        )
        if "bn_inference" in self.replays:
            self.replays["bn_inference"].run(1)
        self.replays["clear_metrics"].run(1)
        self.replays["validate"].run(batches.steps, batches.fill)
        if "validate_result" in self.replays:
            self.replays["validate_result"].run(1)
        sums = self.runtime.arenas[0].copy_out("accumulated")
        loss, top1, top5 = (float(total) / self.validation.rows for total in sums)
        return Metrics(loss, top1, top5)

    def repeated_batches(self, steps: int) -> Batches:
        """Batches of the first epoch's order, over and over, with a learning rate of 0."""
        order = epoch_order(self.train.rows, self.global_batch_size, self.settings.seed, 0)
        repeats = -(-steps // self.steps_per_epoch)
        return self._batches(np.tile(order, repeats), (), 0)

    def weights_digests(self) -> list[str]:
        """One sha256 a rank over the bytes of its W_ slots in arena order, without pads."""
        plan = self.compiled.plan
        names = [t.name for r in plan.table if r.kind == "W" for t in plan.tensors_in(r.name)]
        digests = []
        for arena in self.runtime.arenas:
            digest = hashlib.sha256()
            for name in names:
                digest.update(arena.copy_out(name).tobytes())
            digests.append(digest.hexdigest())
        return digests

    def report(self) -> dict[str, object]:
        """What was run, on what, and how well, as plain data for JSON."""
        return run_report(
            self.runtime,
            self.compiled,
            self.replays["train"],
            global_batch_size=self.global_batch_size,
            dropped_rows=self.dropped_rows,
            model=self.name,
            epochs=self.history,
            weights_digest=self.weights_digests(),
        )

    def close(self) -> None:
        """Give everything back. Does nothing the second time."""
        self._closed = True
        self.replays.clear()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            self._dead = runtime.dead
            runtime.close()

    def _initialise(self) -> None:
        """The initial state on rank 0, then on all: no rank's own beginning is trusted."""
        for name, values in initial_state(self.compiled, self.settings.seed).items():
            self.runtime.arenas[0].copy_in(name, values)
        if "broadcast" in self.replays:
            self.replays["broadcast"].run(1)
        scalars = self._scalars(metric_scale=0.0)
        for arena in self.runtime.arenas:  # read between steps, when no slot has been loaded yet
            arena.copy_in("a.bn_eps", np.array([scalars["bn_eps"]], np.float32))

    def _scalars(self, *, metric_scale: float) -> dict[str, float]:
        """What the host writes into every slot beside rows and learning rate."""
        norms = self.compiled.network.norms
        norm = norms[0].layer if norms else BatchNorm()
        assert isinstance(norm, BatchNorm)  # by construction of `norms`
        return {
            "mu": self.training.momentum,
            "weight_decay": self.training.weight_decay,
            "grad_scale": self.compiled.mean_scale,
            "inv_world": 1.0 / self.compiled.world_size,
            "metric_scale": metric_scale,
            "bn_momentum": norm.momentum,
            "bn_eps": norm.eps,
        }

    def _batches(self, order: NDArray[np.int64], rates: tuple[float, ...], first: int) -> Batches:
        """Training batches in an order of rows, one rate a step."""
        return Batches(
            self.train,
            order,
            self.compiled.world_size,
            self.compiled.network.local_batch,
            self._scalars(metric_scale=self.compiled.mean_scale),
            rates,
            first,
        )

    def _ticker(
        self, progress: Callable[[Progress], None] | None, index: int, epochs: int
    ) -> Callable[[int], None] | None:
        """What the replay calls within an epoch, at most twice a second."""
        if progress is None:
            return None
        steps = self.steps_per_epoch
        first = len(self.history) * steps
        return lambda step: progress(Progress(index, epochs, max(step - first, 0), steps))

    def _epoch(self, schedule: Schedule, index: int, tick: Callable[[int], None] | None) -> Epoch:
        """Train one epoch, the `index`-th of a fit, and validate."""
        started = time.perf_counter()
        steps = self.steps_per_epoch
        first = len(self.history) * steps  # steps count on over epochs: errors name them
        order = epoch_order(
            self.train.rows, self.global_batch_size, self.settings.seed, len(self.history)
        )
        rates = tuple(schedule.rate(index * steps + step) for step in range(steps))
        batches = self._batches(order, rates, first)
        self.replays["clear_metrics"].run(1)
        # Counting every call of the loop once is enough, and leaves the other epochs undisturbed.
        self.replays["train"].run(
            steps, batches.fill, first_step=first, audit=not self.history, progress=tick
        )
        arena = self.runtime.arenas[0]
        rows = float(arena.copy_out("accumulated_rows")[0]) / self.compiled.mean_scale
        taken = round(rows / self.compiled.network.local_batch)
        if taken == 0:
            raise TrlowError(
                f"epoch {len(self.history)}: none of its {steps} steps had a finite loss and "
                f"finite gradients; lower the learning rate ({self.training.lr})"
            )
        train_loss = float(arena.copy_out("accumulated")[0]) / taken
        val = self.validate()
        seconds = time.perf_counter() - started
        return Epoch(train_loss, val.loss, val.top1, val.top5, seconds, steps - taken)
