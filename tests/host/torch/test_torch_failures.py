"""Errors, Ctrl-C and long runs: an end within the deadline that names the place, and no leak."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402

import trlow  # noqa: E402
from trlow.errors import RankError, TrlowError  # noqa: E402
from trlow.torch import StaticDataParallel, host  # noqa: E402

pytestmark = pytest.mark.timeout(60)
BATCH = cases.batches(1)[0]


class Fragile(nn.Linear):
    """Raises when told to."""

    broken = False

    def forward(self, x):
        if self.broken:
            raise ArithmeticError("out of order")
        return super().forward(x)


def fragile():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.ReLU(), Fragile(16, 16))
    return nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(16, cases.CLASSES))


def static_of(ranks=4, factory=fragile, **options):
    settings = cases.host(ranks, **options)
    return StaticDataParallel(factory, cases.cross_entropy, settings, optimizer=cases.adamw)


def broken(static, rank, value):
    """Not through ``static.module``, which waits for the steps."""
    static._members[rank].module[1][1].broken = value


def notes(error):
    """Of an error and what it came from."""
    found = []
    while error is not None:
        found += getattr(error, "__notes__", [])
        error = error.__cause__
    return found


def text(error):
    return "\n".join([str(error), str(error.__cause__), *notes(error)])


# ------------------------------------------------------------------------------ exceptions


def test_a_forward_that_raises_on_one_rank_in_compile():
    with static_of() as static:
        before = static.state_dict()
        broken(static, 1, True)
        with pytest.raises(ArithmeticError, match="out of order") as raised:
            static.compile(BATCH)
        assert "in module 1.1 (Fragile)" in notes(raised.value)
        assert "on rank 1" in notes(raised.value)
        cases.assert_same(static.state_dict(), before)
        broken(static, 1, False)
        static.compile(BATCH)
        assert static.step(BATCH).item() > 0
        cases.assert_ranks_same(static)


def test_a_forward_that_raises_on_one_rank_in_a_later_step():
    with static_of() as static:
        static.compile(BATCH)
        good = [static.step(BATCH) for _ in range(3)]
        assert all(loss.item() > 0 for loss in good)
        static.synchronize()
        broken(static, 1, True)
        began = time.monotonic()
        with pytest.raises(TrlowError) as raised:
            for _ in range(10):
                static.step(BATCH)
        assert time.monotonic() - began < 20
        assert raised.value.rank == 1
        assert "out of order" in text(raised.value)
        assert "in module 1.1 (Fragile)" in notes(raised.value)
        with pytest.raises(TrlowError, match=r"compile|capture"):
            static.step(BATCH)
        broken(static, 1, False)
        static.compile(BATCH)
        losses = [static.step(BATCH).item() for _ in range(5)]
        assert losses[-1] < losses[0]
        cases.assert_ranks_same(static)


def test_the_loss_of_a_step_that_failed_is_no_number_or_an_error():
    """Not the loss of the step before it."""
    with static_of(ranks=2) as static:
        static.compile(BATCH)
        assert static.step(BATCH).item() > 0
        broken(static, 1, True)
        loss = static.step(BATCH).item()
        assert loss != loss
        with pytest.raises(ArithmeticError, match="out of order") as raised:
            static.synchronize()
        assert {"in module 1.1 (Fragile)", "on rank 1"} <= set(notes(raised.value))
        broken(static, 1, False)


def test_an_error_while_ranks_move_into_their_arenas_leaves_their_weights(monkeypatch):
    """Out of memory there, say: what has moved in moves out before the memory goes."""
    made = host.HostSide.__init__

    def fails(self, platform, member, shape):
        if member.rank == 1:
            raise MemoryError("no room")
        made(self, platform, member, shape)

    with static_of(ranks=2, factory=cases.normed) as static:
        before = static.state_dict()
        with monkeypatch.context() as patched:
            patched.setattr(host.HostSide, "__init__", fails)
            with pytest.raises((MemoryError, RankError)) as raised:
                static.compile(BATCH)
        assert "no room" in text(raised.value)
        cases.assert_same(static.state_dict(), before)
        cases.assert_ranks_same(static)
        static.compile(BATCH)
        assert static.step(BATCH).item() > 0


def test_the_bodys_error_is_the_one_that_leaves_the_context():
    with pytest.raises(KeyError, match="body"):
        with static_of(ranks=2) as static:
            static.compile(BATCH)
            static.step(BATCH)
            raise KeyError("body")


def test_a_failed_step_is_a_warning_on_close():
    static = static_of(ranks=2)
    static.compile(BATCH)
    broken(static, 1, True)
    static.step(BATCH)
    time.sleep(0.3)
    with pytest.warns(RuntimeWarning, match="a step failed.*out of order"):
        static.close()
    static.close()


# ------------------------------------------------------------------------------ leaving

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import torch
import torch_cases as cases
from trlow.torch import StaticDataParallel
torch.set_num_threads(1)
(batch,) = cases.batches(1)
static = StaticDataParallel(
    cases.mlp, cases.cross_entropy, cases.host(4), optimizer=cases.adamw
)
static.compile(batch)
static.step(batch).item()
{ending}
"""
PATHS = [str(Path(cases.__file__).parent), str(Path(trlow.__file__).parents[1])]


def command(ending, *flags):
    code = PROGRAM.format(paths=PATHS, ending=ending)
    return [sys.executable, *(flags or ("-W", "error")), "-c", code]


STEPPING = "print('up', flush=True)\nwhile True: static.step(batch)"
INSIDE = f"with static:\n    {STEPPING.replace(chr(10), chr(10) + '    ')}"


@pytest.mark.parametrize("ending", [STEPPING, INSIDE], ids=["alone", "in a context"])
def test_ctrl_c_between_steps_ends_with_keyboard_interrupt_alone(ending):
    child = subprocess.Popen(
        command(ending), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "up\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = child.communicate(timeout=30)
        assert time.monotonic() - began < 10
    finally:
        child.kill()
        child.wait()
    assert child.returncode == cases.interrupted_code()
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.strip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1


# As Python 3.12 and later do once the interpreter ends, of its own accord.
NO_THREADS = """
import atexit, threading
def refused(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(lambda: setattr(threading.Thread, "start", refused))
for _ in range(20): static.step(batch)
"""
ENDINGS = {
    "where no thread starts any more": (NO_THREADS, 0),
    "with steps on their way": ("for _ in range(20): static.step(batch)", 0),
    "by sys.exit in a context": ("with static:\n    static.step(batch); sys.exit(5)", 5),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_leaving_without_close_is_quiet(name):
    ending, code = ENDINGS[name]
    done = subprocess.run(command(ending), capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr) == (code, "")


FORGOTTEN = """
import gc, threading, time
static.synchronize()
del static
gc.collect()
began = time.monotonic()
while threading.active_count() > 1 and time.monotonic() - began < 10:
    time.sleep(0.01)
print([thread.name for thread in threading.enumerate()])
"""


def test_a_forgotten_close_is_a_resource_warning_and_its_threads_end():
    ending = FORGOTTEN
    flags = ("-W", "always::ResourceWarning")
    done = subprocess.run(command(ending, *flags), capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n")
    assert "ResourceWarning: a trlow Runtime was not closed" in done.stderr


# ------------------------------------------------------------------------------ long runs


def resident():
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


def test_memory_is_flat_over_thousands_of_steps():
    with static_of(ranks=2, factory=cases.mlp) as static:
        static.compile(BATCH)
        for _ in range(300):
            static.step(BATCH)
        static.synchronize()
        before = resident()
        losses = [static.step(BATCH) for _ in range(2000)]
        static.synchronize()
        assert losses[-1].item() < losses[0].item()
        del losses
        assert resident() - before < 4 << 20


def test_compiling_again_and_again_leaves_memory_flat(host_live):
    with static_of(ranks=2, factory=cases.mlp) as static:
        for _ in range(3):
            static.compile(BATCH)
        alive, before = host_live(), resident()
        for _ in range(8):
            static.compile(BATCH)
            static.step(BATCH)
        assert host_live() == alive
        assert resident() - before < 4 << 20
