"""What is left of an earlier capture, such as a graph of autograd, does not harm a later one."""

from __future__ import annotations

import warnings

import pytest

from trlow.errors import CaptureError

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import trlow.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("torch_threads"),
]


class Middle(torch.nn.Module):
    """Keeps what it returned, with its graph, or raises in the ``failing``-th forward."""

    def __init__(self):
        super().__init__()
        self.calls, self.failing, self.kept = 0, 0, None

    def forward(self, rows):
        self.calls += 1
        if self.calls == self.failing:
            raise ValueError("planted")
        self.kept = rows * 1.0
        return self.kept


def factory():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), Middle(), torch.nn.Linear(16, 4))


def loss_of(module, batch):
    return module(batch).square().mean()


def batch():
    return torch.linspace(-1, 1, 128).view(8, 16)


def made(settings):
    return trlow.torch.StaticDataParallel(
        factory, loss_of, settings, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=True)
    )


def trains(static):
    losses = [static.step(batch()).item() for _ in range(5)]
    return losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_a_graph_of_autograd_that_outlives_a_capture(gpu_settings):
    with made(gpu_settings(1)) as static:
        for _ in range(3):
            static.compile(batch())
            assert trains(static)
            assert static.module[1].kept.grad_fn is not None
        module = static.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the graph it finds is of another stream
        loss_of(module, batch().to(module[0].weight.device)).backward()  # of torch alone
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_an_exception_that_outlives_a_capture(device, gpu_settings):
    if device == "host":
        pytest.skip("the host device captures nothing of torch's")
    with made(gpu_settings(1)) as static:
        static.compile(batch())
        middle = static.module[1]
        middle.failing, middle.calls = middle.calls, 0  # the capture's forward is the last
        with pytest.raises(CaptureError, match="planted") as caught:
            static.compile(batch())
        assert caught.value.__traceback__ is not None  # and with it every tensor of its frames
        static.compile(batch())
        assert trains(static)
