"""A process of one side of bench/torch_ddp.py: sets up, then runs steps when it is told to.

    python torch_sides.py JSON

Lines of JSON come in on standard input and go out on what was standard output; whatever libraries
print goes to standard error. A wait that outlasts its deadline prints the stacks of all threads and
ends the process. Steps of two processes begin at one moment of the machine's monotonic clock.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch_models import BATCHES, WARM_STEPS, Model, loss_of, model_of
from torch_replica import Replica, Timer
from torch_variant import Variant, variant_of

RECOMPILES = 64  # regions and GPUs share one function; beyond the limit they would run eagerly


class Side(Protocol):
    """What can be told to take steps."""

    warm_loss: float  # of the last warm-up step, so after equally many steps on every side

    def step(self, number: int) -> None:
        """Issue one step with the batch whose turn it is."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def loss(self) -> float:
        """Of the last step."""

    def close(self) -> None:
        """Give back what has to be given back in order."""


# ------------------------------------------------------------------------------ trlow


class Static:
    """All ranks of trlow in one process, or one rank of it."""

    def __init__(self, spec: dict[str, Any], variant: Variant, model: Model, timer: Timer) -> None:
        from trlow import Settings  # noqa: PLC0415  the other sides do without
        from trlow.torch import StaticDataParallel  # noqa: PLC0415

        cuda = spec["device"] == "cuda"
        ranks = [spec["rank"]] if variant.nocomm else range(spec["world_size"])
        window = {"arena": "window", "allow_unabortable": True} if variant.window else {}
        settings = Settings(**{**spec["settings"], **window})
        sizes = {"bucket_nbytes": variant.mib << 20} if variant.mib else {}
        with timer.part("build"):
            self.static = StaticDataParallel(
                lambda: model.factory(variant.compiled),
                loss_of,
                settings,
                optimizer=model.optimizer,
                autocast=torch.bfloat16,
                wire=torch.bfloat16 if variant.wire else None,
                buckets=variant.buckets or None,
                exchange="nccl" if variant.nccl else "auto",
                **sizes,
            )
            hosts = [model.batches(rank, BATCHES) for rank in ranks]
            gpus = settings.devices(64)
            places = [torch.device("cuda", gpu) if cuda else torch.device("cpu") for gpu in gpus]
            self.shards = [
                [
                    tuple(tensor.to(place) for tensor in host[number])
                    for host, place in zip(hosts, places, strict=True)
                ]
                for number in range(BATCHES)
            ]
        with timer.part("compile"):
            parts = zip(*(host[0] for host in hosts), strict=True)
            self.static.compile(model.laid_out([torch.cat(part) for part in parts]))
        with timer.part("warm up"):
            for number in range(WARM_STEPS):
                self.step(number)
            self.synchronize()
            self.warm_loss = self.loss()

    def step(self, number: int) -> None:
        """Issue one step of all ranks."""
        self.last = self.static.step(shards=self.shards[number % BATCHES])

    def synchronize(self) -> None:
        """Wait for all ranks."""
        self.static.synchronize()

    def loss(self) -> float:
        """Of the last step, the mean over ranks."""
        return float(self.last.item())

    def close(self) -> None:
        """Graphs, communicators and arenas."""
        self.static.close()


# ------------------------------------------------------------------------------ the process


def timed(side: Side, steps: int, warm: int, at: float) -> dict[str, float]:
    """Seconds of `steps` steps between two waits for the device, and what issuing them took."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left / 2 if left > 2e-4 else 0)
    for number in range(warm):
        side.step(number)
    side.synchronize()
    cpu, thread, begun = time.process_time(), time.thread_time(), time.perf_counter()
    for number in range(steps):
        side.step(number)
    issued, issued_cpu = time.perf_counter(), time.thread_time()
    side.synchronize()
    ended = time.perf_counter()
    return {
        "step_s": (ended - begun) / steps,
        "issue_s": (issued - begun) / steps,  # waits for a bounded run-ahead included
        "issue_cpu_s": (issued_cpu - thread) / steps,  # of the issuing thread
        "cpu_s": (time.process_time() - cpu) / steps,  # of all threads
    }


def memory(cuda: bool) -> dict[str, Any]:
    """What torch has reserved on each GPU now and at most; of trlow without its arena."""
    if not cuda:
        return {}
    gpus = range(torch.cuda.device_count())
    return {
        "reserved": [torch.cuda.memory_reserved(gpu) for gpu in gpus],
        "reserved_peak": [torch.cuda.max_memory_reserved(gpu) for gpu in gpus],
    }


def compiled_frames() -> dict[str, int]:
    """How many functions torch.compile has met and compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    return dict(module.counters["frames"]) if module is not None else {}


def set_up(spec: dict[str, Any], timer: Timer) -> Side:
    variant = variant_of(spec["side"])
    model = model_of(spec["model"], tiny=spec["tiny"])
    torch.backends.cudnn.benchmark = spec["cudnn_benchmark"]
    torch.set_num_threads(spec["threads"])
    if variant.compiled:
        from torch._dynamo import config  # noqa: PLC0415  only where something is compiled

        # Other threads see defaults alone: what one thread sets is its own.
        config._config["recompile_limit"].default = RECOMPILES  # noqa: SLF001
        assert config.recompile_limit == RECOMPILES
    made: Callable[..., Side] = Static if variant.base == "trlow" else Replica
    return made(spec, variant, model, timer)


def serve(spec: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Set up, then obey until told to end."""
    timer = Timer()
    faulthandler.dump_traceback_later(spec["setup_s"], exit=True)
    side = set_up(spec, timer)
    answer({"setup": timer.seconds, "frames": compiled_frames(), "warm_loss": side.warm_loss})
    for line in sys.stdin:
        faulthandler.cancel_dump_traceback_later()
        asked = json.loads(line)
        faulthandler.dump_traceback_later(asked["deadline_s"], exit=True)
        if "steps" in asked:
            answer(timed(side, asked["steps"], asked["warm"], asked["at"]))
        elif "memory" in asked:
            answer(memory(spec["device"] == "cuda"))
        else:
            loss = side.loss()
            answer({"loss": loss, "finite": math.isfinite(loss)})
            side.close()
            answer({"closed": True})
            return
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()

    def answer(told: dict[str, Any]) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    serve(json.loads(sys.argv[1]), answer)
    sys.stderr.flush()
    os._exit(0)  # graphs and communicators end with the process, in no order


if __name__ == "__main__":
    main()
