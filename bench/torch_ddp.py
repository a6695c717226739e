"""Is a static step in one process faster than DistributedDataParallel, and what does it lose?

    python bench/torch_ddp.py [--models mlp,resnet50_32] [--sides alone,ddp_graph,trlow]
                              [--rounds 5] [--budget 480] [--json FILE]

The same module, loss, optimizer and batches on two GPUs, trained by each side in processes of its
own (torch_sides.py), set up at once, kept alive, and run in turn, round by round, so that clocks
and temperature hit all alike:

alone   the no-communication step: forward, backward and optimizer of one rank in a CUDA graph, on
        both GPUs at once in two processes; the first side is the reference of "ratio", the one
        of the same compilation that of "same"; with _awake each step also sends 4 KiB to the
        other GPU, as links that are awake cost power, and so clock: the reference of "awake"
ddp     DistributedDataParallel (gradient_as_bucket_view, static_graph), one process for each GPU;
        with _graph its whole step is one CUDA graph, after torch's recipe
trlow   StaticDataParallel, all ranks in one process, whose two GPUs copy their gradients; with
        _nccl NCCL sums them, with _nocomm there is one rank in each of two processes

Time per step is the clock between two waits for the device over the steps between, of the slower
process; steps are so many that a round takes --seconds. Beside it: what the issuing thread spends
in its calls (a bounded run-ahead makes it wait there), the CPU time of all threads, and memory.
Models: MLP 784-1024-512-256-10, 200 rows, AdamW; ResNet-50, 32 and 256 rows, SGD; VGG16-BN without
dropout, 128 rows, SGD; a Transformer encoder of 12 layers, 512 wide, 16 rows of 256 tokens, AdamW;
all in float32 with bfloat16 autocast, images channels_last, data on the GPUs already, two batches
in turn, each copied to where a graph reads it as part of the step. With --device host DDP uses
gloo, and what needs a GPU is left out: it shows that the script runs, and no speed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from torch_process import RunningSide, SideFailedError, smi_memory, smi_used
from torch_table import Found, report_setup, show
from torch_variant import GIB, MODELS, PLAIN, SIDES, WORDS, Variant, variant_of

ROUND_S, QUICK_S = 1.0, 0.3
MOST_STEPS = 20_000


# ------------------------------------------------------------------------------ one wave


def set_up(sides: Sequence[RunningSide]) -> list[Found]:
    """Wait for all that were started; those that failed have said so."""
    alive = []
    for side in sides:
        try:
            side.ready()
        except SideFailedError:
            continue
        alive.append(Found(side))
    return alive


def calibrate(found: Found, seconds: float) -> None:
    """So many steps that a round takes about `seconds`, from a few and then from some more."""
    for share in (0.0, 0.1, 1.0):
        told = found.side.steps(found.steps, 2) if share else found.side.steps(2, 2)
        step_s = max(process["step_s"] for process in told)
        found.steps = max(2, min(MOST_STEPS, round(max(share, 0.1) * seconds / step_s)))


def attempt(alive: list[Found], found: Found, work: Any) -> None:
    """Do something with one side; one that fails is left out from there on."""
    try:
        work(found)
    except SideFailedError:
        alive.remove(found)


def run_rounds(arguments: argparse.Namespace, alive: list[Found]) -> None:
    """All sides in turn, each round beginning with another."""
    for found in list(alive):
        attempt(alive, found, lambda one: calibrate(one, arguments.seconds))
    for number in range(arguments.rounds):
        turn = number % max(1, len(alive))
        for found in [*alive[turn:], *alive[:turn]]:
            warm = max(2, found.steps // 10)
            attempt(
                alive, found, lambda one, w=warm: one.rounds.append(one.side.steps(one.steps, w))
            )


def ask_memory(alive: list[Found]) -> None:
    """By torch itself, and by nvidia-smi, which sees contexts, NCCL and trlow's arenas as well."""
    by_smi = smi_memory([found.side for found in alive])
    for found in list(alive):
        attempt(alive, found, lambda one: one.memory.update(torch=one.side.memory()))
        if found.side.name in by_smi:
            found.memory["smi_mib"] = by_smi[found.side.name]


def finish(arguments: argparse.Namespace, alive: list[Found]) -> None:
    """Losses, and the end of each side; where nvidia-smi knows no process, what its end frees."""
    by_difference = arguments.device == "cuda" and not arguments.quick
    before = smi_used() if by_difference else []
    for found in list(alive):
        attempt(alive, found, Found.finish)
        if by_difference and "smi_mib" not in found.memory:
            after = smi_used()
            freed = [one - other for one, other in zip(before, after, strict=False)]
            found.memory["freed_mib"], before = freed, after


def waves(model: str, sides: Sequence[Variant], gib: float) -> list[list[Variant]]:
    """Sides that fit on a GPU together; the reference, the first, is in each wave."""
    room = max(2, int(gib // GIB.get(model, 2)))
    first, others = sides[0], sides[1:]
    parts = [others[start : start + room - 1] for start in range(0, len(others), room - 1)]
    return [[first, *part] for part in parts] or [[first]]


def run_wave(
    arguments: argparse.Namespace, model: str, wave: Sequence[Variant], folder: Path
) -> list[dict[str, Any]]:
    """Start, measure and end the sides of one wave."""
    common = common_of(arguments, model, sum(variant.processes for variant in wave))
    logs = arguments.logs or folder
    started: list[RunningSide] = []
    try:
        alive: list[Found] = []
        for variant in wave:
            started.append(RunningSide(variant, common, arguments.devices, folder, logs))
            if arguments.one_by_one:
                alive += set_up(started[-1:])
        alive = alive if arguments.one_by_one else set_up(started)
        every = list(alive)
        report_setup(model, started)
        run_rounds(arguments, alive)
        ask_memory(alive)
        finish(arguments, alive)
    finally:
        for side in started:
            side.end()
    measured = {found.side.name: found for found in every}
    return [measured.get(side.name, Found(side)).line(measured) for side in started]


def common_of(arguments: argparse.Namespace, model: str, processes: int) -> dict[str, Any]:
    """What every process of a wave is told."""
    fields = report.settings_of(arguments)
    named = [text.partition("=")[0] for text in arguments.setting]
    return {
        "model": model,
        "tiny": arguments.tiny,
        "device": arguments.device,
        "cudnn_benchmark": arguments.cudnn_benchmark,
        "threads": max(1, min(8, (os.cpu_count() or 1) // processes)),
        "setup_s": min(arguments.setup_deadline, max(60.0, arguments.until - time.monotonic())),
        "deadline_s": arguments.deadline,
        "settings": {
            "device": arguments.device,
            "loopback_only": True,
            "graph_mixing": False,
            **{name: getattr(fields, name) for name in named},
        },
    }


# ------------------------------------------------------------------------------ the command


def chosen_sides(arguments: argparse.Namespace, model: str) -> tuple[list[Variant], list[str]]:
    """The sides of one model, and those that this machine has not."""
    names = arguments.sides.split(",") if arguments.sides else list(SIDES[model])
    names += [name for name in arguments.beside if name not in names]
    more = [f"_{word}" for word in arguments.trlow_words]
    names = [name + "".join(more) if name.startswith("trlow") else name for name in names]
    variants = [variant_of(name) for name in names]
    if arguments.device == "host" and all(variant.needs_cuda for variant in variants):
        variants += [variant_of(name) for name in PLAIN]  # to show that the model runs
    left_out = [v.name for v in variants if v.needs_cuda and arguments.device == "host"]
    return [variant for variant in variants if variant.name not in left_out], left_out


def read_arguments() -> argparse.Namespace:
    made = report.parser(__doc__)
    made.epilog = WORDS
    made.add_argument("--models", default=",".join(MODELS), help="which of them (default all)")
    made.add_argument("--sides", help="instead of each model's own; the first is the reference")
    made.add_argument("--beside", action="append", default=[], help="one more side for each model")
    made.add_argument("--wire", choices=("bf16",), help="of every trlow side")
    made.add_argument("--cta", type=int, help="NCCL_MAX_CTAS of every trlow side")
    made.add_argument("--buckets", type=int, help="of every trlow side")
    made.add_argument("--rounds", type=int)
    made.add_argument("--seconds", type=float, help="of one round of one side")
    made.add_argument("--quick", action="store_true", help="two short rounds")
    made.add_argument("--tiny", action="store_true", help="models of a few hundred parameters")
    made.add_argument("--budget", type=float, help="seconds after which no model is started")
    made.add_argument("--gib", type=float, default=130, help="that sides may take on one GPU")
    made.add_argument("--setup-deadline", type=float, default=240, metavar="S")
    made.add_argument("--deadline", type=float, default=60, metavar="S", help="of one round")
    made.add_argument("--logs", type=Path, help="keep what the processes print in this folder")
    made.add_argument("--one-by-one", action="store_true", help="set the sides up one by one")
    made.add_argument(
        "--cudnn-benchmark",
        action="store_true",
        help="let cuDNN choose by measuring; sides are set up one by one then, undisturbed",
    )
    arguments = made.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    arguments.seconds = arguments.seconds or (QUICK_S if arguments.quick else ROUND_S)
    arguments.one_by_one |= arguments.cudnn_benchmark
    words = {"cta": arguments.cta, "buckets": arguments.buckets}
    arguments.trlow_words = [f"{name}{value}" for name, value in words.items() if value]
    arguments.trlow_words += [arguments.wire] if arguments.wire else []
    arguments.devices = report.settings_of(arguments).devices(64)
    arguments.models = arguments.models.split(",")
    arguments.until = time.monotonic() + (arguments.budget or math.inf)
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    if len(arguments.devices) != 2:
        made.error("--gpus: two, such as 0-1")
    try:
        for model in arguments.models:
            chosen_sides(arguments, model)
    except (KeyError, ValueError) as error:
        made.error(str(error))
    return arguments


def versions() -> dict[str, str | None]:
    """Of torch's packages, which the machine's description does not have."""
    found: dict[str, str | None] = {}
    for name in ("torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> None:
    arguments = read_arguments()
    begun = time.monotonic()
    here = {**report.machine(), **versions()}
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{report.header(here)}\n{told}\n", flush=True)
    results: dict[str, Any] = {}
    not_run: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            if time.monotonic() > arguments.until:
                not_run.append(model)
                continue
            sides, left_out = chosen_sides(arguments, model)
            if left_out:
                print(f"{model}: need a GPU and are left out: {', '.join(left_out)}")
            results[model] = {"waves": [], "left_out": left_out}
            for wave in waves(model, sides, arguments.gib):
                lines = run_wave(arguments, model, wave, Path(folder))
                results[model]["waves"].append(lines)
                show(model, lines)
                report.save(arguments, here, {"models": results, "not_run": not_run})
    if not_run:
        print(f"not run, over the budget of {arguments.budget} s: {', '.join(not_run)}")
    print(f"{time.monotonic() - begun:.0f} s in all")
    report.save(arguments, here, {"models": results, "not_run": not_run})


if __name__ == "__main__":
    main()
