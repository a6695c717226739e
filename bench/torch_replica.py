"""One rank of PyTorch itself for bench/torch_ddp.py: with DistributedDataParallel, or alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch_models import BATCHES, WARM_STEPS, Batch, Model, loss_of
from torch_variant import Variant

TOUCH_NBYTES = 4096


class Timer:
    """How long each part of the set-up took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 2)


class Replica:
    """One rank of DDP, or a rank alone: the step is issued eagerly, or one captured graph."""

    def __init__(self, spec: dict[str, Any], variant: Variant, model: Model, timer: Timer) -> None:
        self.variant, self.model = variant, model
        self.cuda = spec["device"] == "cuda"
        self.device = torch.device("cuda", spec["gpu"]) if self.cuda else torch.device("cpu")
        self.autocast = torch.autocast(self.device.type, torch.bfloat16)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.last = torch.zeros(())
        if self.cuda:
            torch.cuda.set_device(self.device)  # or torch opens a context on the first GPU as well
        with timer.part("process group"):
            if variant.base == "ddp":
                join(spec, self.device)
        # Autograd accumulates on the stream on which a parameter was first used, DDP's set-up
        # included, so the whole life of the side up to the capture is on one stream beside.
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        with timer.part("build"), self.beside():
            self.build(spec)
        with timer.part("warm up"), self.beside():
            for number in range(WARM_STEPS):
                self.eager_step(self.batches[number % BATCHES])
            self.synchronize()
            self.warm_loss = self.loss()  # before the capture, which runs nothing
        if self.cuda and (variant.graph or variant.base == "alone"):
            with timer.part("capture"):
                self.capture()

    def beside(self) -> Any:
        """On the side's stream, if there are streams."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def build(self, spec: dict[str, Any]) -> None:
        """Module, optimizer, batches."""
        variant = self.variant
        whole_ddp = variant.base == "ddp" and variant.compiled == "whole"
        module = self.model.factory("" if whole_ddp else variant.compiled).to(self.device)
        if variant.base == "ddp":
            module = data_parallel(module, variant, self.device)
            module = torch.compile(module) if whole_ddp else module
        self.module = module
        self.touch = touch_of(self.device, spec["peer"]) if variant.awake else None
        self.optimizer = self.model.optimizer(module.parameters())
        self.batches = [
            tuple(tensor.to(self.device) for tensor in batch)
            for batch in self.model.batches(spec["rank"], BATCHES)
        ]

    def eager_step(self, batch: Batch) -> None:
        """Issue a whole step, call by call."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = loss_of(self.module, batch)
        loss.backward()
        self.optimizer.step()
        self.last = loss.detach()

    def capture(self) -> None:
        """Make the same step one graph, on the stream that it has run on."""
        self.inputs = tuple(tensor.clone() for tensor in self.batches[0])
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # the graph has a pool of its own
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's watchdog of torch and autograd's threads go on beside it.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.eager_step(self.inputs)
            if self.touch is not None:
                self.touch()
        self.graph = graph

    def step(self, number: int) -> None:
        """Issue one step, as a graph if there is one."""
        batch = self.batches[number % BATCHES]
        if self.graph is None:
            self.eager_step(batch)
            return
        for target, source in zip(self.inputs, batch, strict=True):
            target.copy_(source, non_blocking=True)
        self.graph.replay()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def loss(self) -> float:
        """Of the last step, on this rank."""
        return float(self.last.item())

    def close(self) -> None:
        """Nothing: a communicator that a live graph has captured would never go."""


def join(spec: dict[str, Any], device: torch.device) -> None:
    """Meet the other rank, by a file; NCCL or gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"file://{spec['store']}",
        rank=spec["rank"],
        world_size=spec["world_size"],
        timeout=timedelta(seconds=spec["deadline_s"]),
        device_id=device if device.type == "cuda" else None,
    )


def touch_of(device: torch.device, peer: int) -> Callable[[], None]:
    """What copies a few bytes into the memory of GPU `peer`, on the current stream.

    Links that nothing has crossed for a while sleep: on an H200 for 500 times 100 us, as NVML says
    (NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD). One copy in each step keeps them awake.
    """
    from cuda.bindings import runtime  # noqa: PLC0415  this side alone

    if peer == device.index:
        raise SystemExit("awake: there is one GPU, and no link")
    near = torch.zeros(TOUCH_NBYTES, dtype=torch.uint8, device=device)
    far = torch.zeros(TOUCH_NBYTES, dtype=torch.uint8, device=torch.device("cuda", peer))
    torch.cuda.synchronize(far.device)
    said = runtime.cudaDeviceEnablePeerAccess(peer, 0)[0]
    if said not in (
        runtime.cudaError_t.cudaSuccess,
        runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled,
    ):
        raise SystemExit(f"awake: GPU {device.index} does not reach GPU {peer}: {said!r}")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def touch() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        (said,) = runtime.cudaMemcpyAsync(
            far.data_ptr(), near.data_ptr(), TOUCH_NBYTES, kind, stream
        )
        if said != runtime.cudaError_t.cudaSuccess:
            raise SystemExit(f"awake: {said!r}")

    return touch


def data_parallel(module: torch.nn.Module, variant: Variant, device: torch.device) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415  slow

    less = {"broadcast_buffers": False} if variant.nobuffers else {}
    made = torch.nn.parallel.DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        **less,
        bucket_cap_mb=variant.mib or None,
    )
    if variant.wire:
        made.register_comm_hook(distributed.group.WORLD, default_hooks.bf16_compress_hook)
    return made
