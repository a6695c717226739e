"""Failures of torch work on real GPUs: one error, in time, and the next step works."""

from __future__ import annotations

import gc
import itertools
import math
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import torch_cases  # noqa: E402

import trlow.torch  # noqa: E402
from trlow.errors import CaptureError, RankError, TrlowError, UsageError  # noqa: E402

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(90),
    pytest.mark.usefixtures("torch_threads"),
]
ROOT = str(Path(trlow.__file__).parents[1])
DEADLINE_S = 15.0


@pytest.fixture
def settings(gpu_settings):
    return gpu_settings(2, deadline_s=DEADLINE_S)


@pytest.fixture
def in_time():
    """The whole test, with what works afterwards, in little more than the deadline."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < 2 * DEADLINE_S


def mlp(*middle):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), *middle, torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*layers)


def cross_entropy(module, batch):
    rows, labels = batch
    return torch.nn.functional.cross_entropy(module(rows), labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True, capturable=True)


def batch(rows=32):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, 32, generator=generator)
    return data, (data[:, 0] > 0).long()


def made(settings, factory=mlp, loss_fn=cross_entropy, optimizer=adamw, **options):
    return trlow.torch.StaticDataParallel(
        factory, loss_fn, settings, optimizer=optimizer, **options
    )


def trains(static):
    """Whether it learns, with the same weights on both ranks."""
    first = static.step(batch()).item()
    for _ in range(20):
        loss = static.step(batch())
    one, other = (list(module.parameters()) for module in static.modules())
    same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))
    return loss.item() < 0.9 * first and same


def works(settings):
    """Whether another one, made afterwards in this process, trains."""
    with made(settings) as static:
        static.compile(batch())
        return trains(static)


def notes(error):
    return " / ".join(getattr(error, "__notes__", ()))


class Planted(torch.nn.Module):
    """Calls ``work`` in the forward of one rank's capture, which on the host device is a replay."""

    def __init__(self, rank, wanted, device, work):
        super().__init__()
        self.mine, self.device, self.work, self.calls = rank == wanted, device, work, 0

    def forward(self, rows):
        self.calls += 1
        if self.mine and self.is_time():
            return self.work(rows)
        return rows

    def is_time(self):
        if self.device == "cuda":
            return torch.cuda.is_current_stream_capturing()
        return self.calls > 1  # the first was by the caller's thread, to measure


def planted(device, work, rank=1):
    ranks = itertools.count()
    return lambda: mlp(Planted(next(ranks), rank, device, work))


# ------------------------------------------------------------------------------ while it compiles


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_ranks_forward_during_the_capture(device, settings, in_time, rank):
    def fail(_):
        raise ValueError("planted")

    with made(settings, planted(device, fail, rank)) as static:
        with pytest.raises((CaptureError, ValueError), match="planted") as caught:
            static.compile(batch())
        assert "Planted" in notes(caught.value)
        if device == "cuda":
            assert (caught.value.rank, caught.value.stage) == (rank, "COMPUTE")
        with pytest.raises(UsageError, match="compile"):
            static.step(batch())
    assert works(settings)


def test_an_exception_in_the_first_forward_of_all(settings, in_time):
    class Broken(torch.nn.Module):
        def forward(self, rows):
            raise ValueError("planted")

    with made(settings, lambda: mlp(Broken())) as static:
        with pytest.raises(ValueError, match="planted") as caught:
            static.compile(batch())
        assert "in module 2 (Broken)" in notes(caught.value)
    assert works(settings)


class Reads(torch.nn.Module):
    def forward(self, rows):
        return rows * (1.0 if rows.sum().item() > 0 else 2.0)


class Draws(torch.nn.Module):
    """From a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = None

    def forward(self, rows):
        self.generator = self.generator or torch.Generator(rows.device)
        return rows * torch.rand(rows.shape, device=rows.device, generator=self.generator)


@pytest.mark.parametrize(
    ("factory", "name", "hint"),
    [
        (lambda: mlp(Reads()), "Reads", "item()"),
        (lambda: mlp(Draws()), "Draws", "random"),
    ],
    ids=["item", "own generator"],
)
def test_what_a_graph_cannot_hold_is_named(device, settings, in_time, factory, name, hint):
    if device == "host":
        pytest.skip("the host device runs the forward in every replay, so it may wait and draw")
    with made(settings, factory) as static:
        with pytest.raises(TrlowError) as caught:
            static.compile(batch())
        assert name in notes(caught.value), (caught.value, notes(caught.value))
        assert hint in notes(caught.value), (caught.value, notes(caught.value))
    assert works(settings)


def test_a_parameter_without_a_gradient_is_named(settings, in_time):
    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(3))

        def forward(self, rows):
            return rows

    with made(settings, lambda: mlp(Idle())) as static:
        with pytest.raises(UsageError, match=r"2\.unused"):
            static.compile(batch())
    assert works(settings)


def test_an_optimizer_that_a_graph_cannot_hold_is_refused(device, settings, in_time):
    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    autocasts = [None, torch.float16] if device == "cuda" else [torch.float16]
    for autocast in autocasts:
        with pytest.raises(UsageError, match=r"SGD .*fused=True"):
            made(settings, optimizer=plain, autocast=autocast)
    assert works(settings)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fused_alone_trains_or_is_refused_with_what_to_write(device, settings, in_time, name):
    """Torch's Adam is fused in a graph only if it is capturable as well."""

    def fused(parameters):
        return getattr(torch.optim, name)(parameters, lr=1e-2, fused=True)

    refused = None
    try:
        with made(settings, optimizer=fused) as static:
            static.compile(batch())
            static.step(batch()).item()
    except TrlowError as error:
        refused = str(error)
    assert refused is None or (name != "SGD" and "capturable" in refused)
    assert works(settings)


# ------------------------------------------------------------------------------ out of memory


def test_out_of_memory_on_one_rank_before_the_capture(device, settings, in_time):
    """Rank 1's GPU is full, so its forward finds nothing; the other rank's would."""
    if device == "host":
        pytest.skip("needs a GPU whose memory can be filled")
    spare, huge = 256 << 20, 1 << 30
    wide = lambda: mlp(torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64))  # noqa: E731
    rows = 2 * (huge // 4 // 8192)  # one activation of a rank takes a gibibyte
    hog, static = None, made(settings, wide)
    try:
        free, _ = torch.cuda.mem_get_info(1)
        hog = torch.empty(free - spare, dtype=torch.uint8, device="cuda:1")
        with pytest.raises((TrlowError, torch.OutOfMemoryError), match="out of memory"):
            static.compile(batch(rows))
    finally:
        del hog
        gc.collect()
        torch.cuda.empty_cache()
    static.compile(batch())
    assert math.isfinite(static.step(batch()).item())
    static.close()
    assert works(settings)


def test_out_of_memory_on_one_rank_in_the_capture(device, settings, in_time):
    def grow(rows):
        if device == "host":
            raise torch.OutOfMemoryError("planted: out of memory")
        twice = 2 * torch.cuda.get_device_properties(1).total_memory
        return rows + torch.empty(twice, dtype=torch.uint8, device=rows.device)[0]

    expected = (CaptureError, torch.OutOfMemoryError)
    with made(settings, planted(device, grow)) as static:
        with pytest.raises(expected, match="out of memory"):
            static.compile(batch())
    assert works(settings)


# ------------------------------------------------------------------------------ while it steps


def test_a_batch_of_another_shape_or_dtype_is_refused_and_the_next_step_works(settings, in_time):
    rows, labels = batch()
    with made(settings) as static:
        static.compile((rows, labels))
        static.step((rows, labels))
        for wrong in (
            (rows[:-2], labels[:-2]),
            (rows[:, :-1], labels),
            (rows.double(), labels),
            (rows, labels, labels),
            [rows, labels],
            rows,
        ):
            with pytest.raises(UsageError, match=r"compile"):
                static.step(wrong)
        with pytest.raises(UsageError, match="shards"):
            static.step(shards=[(rows, labels)])
        assert trains(static)
    with made(settings) as static:
        with pytest.raises(UsageError, match="multiple of the 2 ranks"):
            static.compile(batch(31))
        static.compile(batch(30))
        static.step(batch(30)).item()


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 0)])
def test_a_rank_that_raises_ahead_of_its_launch(settings, in_time, rank, step):
    with made(settings) as static:
        static.compile(batch())
        before = static._captured.sides[rank].before

        def broken(of_rank, payload):
            if of_rank.status.step == step:
                raise OSError("no more data")
            before(of_rank, payload)

        static._captured.sides[rank].before = broken
        begun = time.monotonic()
        with pytest.raises(RankError, match="no more data") as caught:
            for _ in range(10):
                static.step(batch())
            static.synchronize()
        assert time.monotonic() - begun < DEADLINE_S
        assert (caught.value.rank, caught.value.step) == (rank, step)
        with pytest.raises(UsageError, match="again"):
            static.step(batch())
        static.compile(batch())
        assert trains(static)
    assert works(settings)


def test_a_rank_that_never_launches_is_an_error_within_the_deadline(gpu_settings):
    release = threading.Event()
    settings = gpu_settings(2, deadline_s=3.0)
    with made(settings) as static:
        static.compile(batch())
        before = static._captured.sides[1].before

        def late(rank, payload):
            if rank.status.step == 3:
                release.wait(6.0)
            before(rank, payload)

        static._captured.sides[1].before = late
        begun = time.monotonic()
        with pytest.raises(RankError, match="no progress"):
            for _ in range(10):
                static.step(batch())
            static.synchronize()
        assert time.monotonic() - begun < 15
        release.set()
    assert works(settings)


def test_a_caller_that_thinks_for_longer_than_the_deadline_is_no_failure(gpu_settings):
    with made(gpu_settings(2, deadline_s=1.0)) as static:
        static.compile(batch())
        static.step(batch())
        time.sleep(2.5)
        assert trains(static)


# ------------------------------------------------------------------------------ Ctrl-C


PROCESS = """
import sys
sys.path[:0] = {paths!r}
import torch, trlow
from test_torch_failures import batch, made, works
torch.set_num_threads(1)
settings = trlow.Settings(device={device!r}, gpus="0-1", deadline_s={deadline})
def forever(static, read):
    static.compile(batch())
    print("stepping", flush=True)
    while True:
        loss = static.step(batch())
        if read:
            loss.item()
for read in (False, True):
    try:
        with made(settings) as static:
            forever(static, read)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("works" if works(settings) else "broken", flush=True)
forever(made(settings), False)
"""


def test_ctrl_c_in_a_loop_of_steps_of_losses_and_uncaught(device):
    """One process and three signals: two are caught, and another one works; the third ends it."""
    paths = [ROOT, str(Path(__file__).parent), str(Path(torch_cases.__file__).parent)]
    text = PROCESS.format(paths=paths, device=device, deadline=DEADLINE_S)
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    guard = threading.Timer(75, process.kill)
    guard.start()
    said = []

    def interrupt():
        said.append(process.stdout.readline())
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        return time.monotonic()

    try:
        for _ in range(2):
            begun = interrupt()
            said += [process.stdout.readline(), process.stdout.readline()]
            assert time.monotonic() - begun < 2 * DEADLINE_S
        begun = interrupt()
        _, err = process.communicate()
        assert time.monotonic() - begun < 2 * DEADLINE_S
    finally:
        guard.cancel()
        process.kill()
        process.communicate()
    assert said == [*(["stepping\n", "interrupted\n", "works\n"] * 2), "stepping\n"], err
    assert process.returncode == torch_cases.interrupted_code(), err
    assert re.search(r"^KeyboardInterrupt", err, re.MULTILINE)
