"""Thousands of torch steps and whole lives of a StaticDataParallel: no memory stays behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import trlow.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("torch_threads"),
]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def convolutions():
    """Kernels of cuDNN and cuBLAS, and batch norm."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(16, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16 * 7 * 7, 10))


def cross_entropy(module, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(module(images), labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=True)


def batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 16, 16, generator=generator)
    return images, torch.randint(0, 10, (16,), generator=generator)


def made(settings, **options):
    return trlow.torch.StaticDataParallel(
        convolutions, cross_entropy, settings, optimizer=adamw, **options
    )


def gpu_memory(device):
    """Bytes in use on each GPU, by whomever; the host device has none."""
    if device == "host":
        return []
    found = []
    for index in range(2):
        free, total = torch.cuda.mem_get_info(index)
        found.append(total - free)
    return found


def resident():
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_thousand_steps_leave_memory_flat(device, gpu_settings, accumulate):
    """With a schedule, batches from the host, and losses that are read and that are not."""
    steps = 2_000 if device == "cuda" else 100
    given = batch()
    with made(gpu_settings(2), accumulate=accumulate) as static:
        schedule = torch.optim.lr_scheduler.ExponentialLR(static.optimizer, 0.999)
        static.compile(given)

        def train(count):
            for step in range(count):
                loss = static.step(given)
                if step % 10 == 0:
                    loss.item()
                    schedule.step()
            static.synchronize()

        train(200)
        gc.collect()
        on_gpus, on_host = gpu_memory(device), resident()
        train(steps)
        gc.collect()
        assert gpu_memory(device) == on_gpus
        assert resident() - on_host < 8 * MIB  # 4 KiB a step would be as much


LIVES = """
import json, sys
sys.path[:0] = {paths!r}
import trlow
from test_torch_stability import life
settings = trlow.Settings(**json.loads(sys.argv[1]))
print(json.dumps([life(settings) for _ in range(4)]))
"""


def life(settings):
    """All of one, and the memory that is in use behind it: of each GPU, and of the host."""
    given = batch()
    with made(settings) as static:
        static.compile(given)
        for _ in range(20):
            static.step(given)
        static.synchronize()
    del static
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return gpu_memory(settings.device), resident()


def test_the_fourth_life_leaves_no_more_memory_than_the_second(gpu_settings):
    """In a process of one malloc arena.

    With an arena for each thread, which is glibc's way, communicators that come and go leave 168 MB
    of resident memory behind, nearly all of it by the tenth: free memory in arenas of NCCL's
    threads, which would hide a leak.
    """
    paths = [str(ROOT), str(Path(__file__).parent)]
    fields = json.dumps(dataclasses.asdict(gpu_settings(2)))
    done = subprocess.run(
        [sys.executable, "-c", LIVES.format(paths=paths), fields],
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lives = json.loads(done.stdout.splitlines()[-1])
    (gpus, host), (gpus_later, host_later) = lives[1], lives[3]
    for earlier, later in zip(gpus, gpus_later, strict=True):
        assert later - earlier <= 4 * MIB, lives
    assert host_later - host < 8 * MIB, lives


def test_compiling_again_gives_the_memory_of_the_first_time_back(device, gpu_settings):
    given = batch()
    with made(gpu_settings(2)) as static:
        used = []
        for _ in range(3):
            static.compile(given)
            static.step(given).item()
            gc.collect()
            used.append(gpu_memory(device))
        for first, third in zip(used[0], used[2], strict=True):
            assert third - first <= 4 * MIB, used


def test_module_and_states_work_after_close(device, gpu_settings):
    given = batch()
    with made(gpu_settings(2)) as static:
        static.compile(given)
        for _ in range(5):
            static.step(given)
        state, module = static.state_dict(), static.module
        where = next(module.parameters()).device
        images = given[0].to(where)
        module.eval()
        with torch.no_grad():
            wanted = module(images).cpu()
    gc.collect()
    spoiled = [torch.full((MIB,), 1e9, device=where) for _ in range(8)]  # whoever asks next
    assert static.module is module
    with torch.no_grad():
        torch.testing.assert_close(module(images).cpu(), wanted, rtol=1e-3, atol=1e-4)
    for name, tensor in static.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name].cpu()), name
    plain = convolutions()
    plain.load_state_dict(static.state_dict())
    module.train()
    cross_entropy(module, [tensor.to(where) for tensor in given]).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    moments = static.optimizer_state_dict()["state"][0]
    assert moments["step"].item() == 5
    assert spoiled[0][0] == 1e9
    static.close()
