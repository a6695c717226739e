"""Thousands of torch steps and whole lives of a StaticDataParallel: no memory stays behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import trlow.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("torch_threads"),
]
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


def test_the_third_life_leaves_no_more_memory_than_the_first(device, gpu_settings):
    given = batch()

    def live():
        with made(gpu_settings(2)) as static:
            static.compile(given)
            for _ in range(20):
                static.step(given)
            static.synchronize()
        del static
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        return gpu_memory(device), resident()

    lives = [live() for _ in range(3)]
    for first, third in zip(lives[0][0], lives[2][0], strict=True):
        assert third - first <= 4 * MIB, lives
    assert lives[2][1] - lives[0][1] < 64 * MIB, lives  # the host's allocator keeps what it likes


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
