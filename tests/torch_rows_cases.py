"""Tests of the kernels over rows of a table: optimizers against torch's own, copies of gradients.

For host/ and gpu/, which have a fixture ``device`` each.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from trlow.device import Platform, Streams
from trlow.kernel import Kernels
from trlow.settings import Settings
from trlow.torch.fused import KERNELS, FusedStep, covers
from trlow.torch.rows import Table, alike, rows

SHAPES = [(3, 5), (1,), (64, 130), (4097,), (8, 3, 3, 3), (100_003,)]
ADAMS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "fused": True}
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, **ADAMS),
    "Adam, decay": lambda p: torch.optim.Adam(p, **ADAMS, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, **ADAMS, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD, decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "SGD, nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1, fused=True
    ),
}


class Bench:
    """Kernels of the first device, on a stream that is torch's current one as well."""

    def __init__(self, device, stack):
        platform = Platform.open(Settings(device=device))
        platform.cudart.cudaSetDevice(0)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.streams = Streams(platform, ["rows"])
        stack.callback(self.streams.close)
        self.kernels = Kernels(platform, 0)
        stack.callback(self.kernels.close)
        self.kernels.load(("gather_rows", *KERNELS))
        self.stream = self.streams["rows"]
        self.tables = []
        if device == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(self.stream)))

    def table(self, found):
        self.tables.append(Table(self.device, found))
        self.tables[-1].fill()
        return self.tables[-1]

    def wait(self):
        self.streams.synchronize()


@pytest.fixture
def bench(device):
    with ExitStack() as stack:
        yield Bench(device, stack)


def parameters(device, count=None):
    generator = torch.Generator().manual_seed(3)
    found = []
    for shape in SHAPES[:count]:
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        found.append(torch.nn.Parameter(tensor.to(device)))
    return found


def set_gradients(mine, generator):
    for parameter in mine:
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(drawn)


def gradients_of(mine):
    return {parameter: parameter.grad for parameter in mine}


def covered(optimizer, mine):
    known = {parameter: grad for parameter, grad in gradients_of(mine).items() if grad is not None}
    return covers(optimizer, known)


def made(optimizer, mine, device):
    """With what its first step makes, and rates on the device."""
    set_gradients(mine, torch.Generator().manual_seed(0))
    found = optimizer(mine)
    for group in found.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)
    found.step()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_in_rows_is_torchs(bench, name):
    mine, other = parameters(bench.device), parameters(bench.device)
    optimizer = made(OPTIMIZERS[name], mine, bench.device)
    reference = made(OPTIMIZERS[name], other, bench.device)
    assert covered(optimizer, mine)
    step = FusedStep(bench.kernels, optimizer, bench.table)
    generator = torch.Generator().manual_seed(5)
    for number in range(20):
        state = generator.get_state()
        set_gradients(mine, generator)
        generator.set_state(state)
        set_gradients(other, generator)
        for each in (optimizer, reference):
            each.param_groups[0]["lr"].fill_(0.1 / (1 + number))
        step(gradients_of(mine), bench.stream, counts=True)
        bench.wait()
        reference.step()
    bench.wait()
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)
    for one, two in zip(mine, other, strict=True):
        for key, value in reference.state[two].items():
            torch.testing.assert_close(optimizer.state[one][key], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("name", ["AdamW", "SGD, nesterov"])
def test_a_step_with_inboxes_is_one_with_the_sum(bench, name, shift):
    """To the last bit: the sum is rounded as in a kernel of its own. Some have no inbox."""
    mine, other = parameters(bench.device), parameters(bench.device)
    optimizer = made(OPTIMIZERS[name], mine, bench.device)
    reference = made(OPTIMIZERS[name], other, bench.device)
    generator, inboxes = torch.Generator().manual_seed(5), {}
    set_gradients(mine, generator)
    for one, two in zip(mine, other, strict=True):
        two.grad.copy_(one.grad)
        if one is not mine[2]:
            arena = torch.empty(one.numel() + 8, device=bench.device)
            inboxes[one] = arena.as_strided(one.shape, one.stride(), shift)
            inboxes[one].copy_(torch.randn(one.shape, generator=generator))
            two.grad += inboxes[one]
    step = FusedStep(bench.kernels, optimizer, bench.table, inboxes)
    step(gradients_of(mine), bench.stream, counts=True)
    plain = FusedStep(bench.kernels, reference, bench.table)
    plain(gradients_of(other), bench.stream, counts=True)
    bench.wait()
    for one, two in zip(mine, other, strict=True):
        assert torch.equal(one, two)
        for key, value in reference.state[two].items():
            assert torch.equal(optimizer.state[one][key], value)


def test_groups_have_numbers_of_their_own_in_every_bucket(bench):
    def grouped(mine):
        groups = [{"params": mine[:2], "weight_decay": 0.5}, {"params": mine[2:], "eps": 1e-2}]
        groups.append({"params": []})
        return torch.optim.AdamW(groups, **ADAMS)

    mine, other = parameters(bench.device), parameters(bench.device)
    optimizer, reference = made(grouped, mine, bench.device), made(grouped, other, bench.device)
    halves = [gradients_of(mine[1::2]), gradients_of(mine[::2])]
    step = FusedStep(bench.kernels, optimizer, bench.table)
    for bucket, half in enumerate(halves):
        step(half, bench.stream, counts=bucket == 0, blocks=3)
    bench.wait()
    reference.step()
    bench.wait()
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, **ADAMS, amsgrad=True),
        lambda p: torch.optim.AdamW(p, **ADAMS, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-2),
    ],
    ids=["amsgrad", "maximize", "not fused", "no momentum", "another"],
)
def test_what_is_not_covered_is_left_to_torch(bench, optimizer):
    mine = parameters(bench.device)
    set_gradients(mine, torch.Generator().manual_seed(0))
    found = optimizer(mine)
    found.step()
    assert not covered(found, mine)


def test_hooks_and_unequal_steps_are_left_to_torch(bench):
    mine = parameters(bench.device)
    optimizer = made(OPTIMIZERS["AdamW"], mine, bench.device)
    assert covered(optimizer, mine)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert not covered(optimizer, mine)
    handle.remove()
    assert covered(optimizer, mine)
    optimizer.state[mine[1]]["step"].fill_(7)
    assert not covered(optimizer, mine)


def test_parameters_of_another_dtype_or_layout_are_left_to_torch(bench):
    mine = parameters(bench.device, 1)
    optimizer = made(OPTIMIZERS["AdamW"], mine, bench.device)
    assert covered(optimizer, mine)
    mine[0].grad = torch.zeros(5, 3, device=bench.device).t()
    assert not covered(optimizer, mine)
    mine[0].grad = None
    assert not covered(optimizer, mine)


@pytest.mark.parametrize("told", [False, True], ids=["", "told where"])
@pytest.mark.parametrize("blocks", [1, 32, None])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_gathered_pieces_are_the_same_bytes_and_nothing_beside(bench, blocks, shift, told):
    """Also of 16-bit floats at odd places, and where the device is told how far off they lie."""
    sources, targets, arenas = [], [], []
    for index, parameter in enumerate(parameters(bench.device)):
        source = parameter.detach().to(torch.float32 if index % 2 else torch.bfloat16)
        arena = torch.full((source.numel() + 64,), 7.0, dtype=source.dtype, device=bench.device)
        targets.append(arena.as_strided(source.shape, source.stride(), shift))
        sources.append(source)
        arenas.append(arena)
    pairs = list(zip(targets, sources, strict=True))
    assert all(map(alike, pairs))
    off = torch.tensor([12_340_000 if told else 0], device=bench.device)
    found = ([to, place - off.item(), size] for to, place, size in rows(pairs, 1))
    table = bench.table(found)
    values = (0, 0, off.data_ptr() if told else 0, table.address, table.entries)
    bench.kernels.launch("gather_rows", values, blocks or table.entries, bench.stream)
    bench.wait()
    for (target, source), arena in zip(pairs, arenas, strict=True):
        assert torch.equal(target, source)
        assert (arena[:shift] == 7).all()
        assert (arena[shift + source.numel() :] == 7).all()


def test_what_lies_differently_is_not_alike():
    a = torch.zeros(4, 6)
    assert alike((a, torch.ones(4, 6)))
    assert alike((a.t(), torch.ones(4, 6).t()))
    assert not alike((a, torch.ones(6, 4).t()))
    assert not alike((a, torch.ones(6, 4)))
    assert not alike((a, torch.ones(4, 6, dtype=torch.float64)))
    assert not alike((a[:, :3], a[:, 3:]))  # gaps
    assert alike((torch.zeros(4, 1, 6), torch.ones(4, 1, 6)))
