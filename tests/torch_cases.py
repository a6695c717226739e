"""Modules, batches and plain loops of torch that tests compare ``trlow.torch`` with."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch
from torch import nn

import trlow

CLASSES = 4
# Two ways to add the same float32 numbers. AdamW divides by the root of a mean square, so where a
# gradient is near zero one weight differs by more than rounding: by a part of the rate a step.
LOSSES = {"rtol": 1e-4, "atol": 1e-5}
WEIGHTS = {"rtol": 1e-3, "atol": 1e-4}


def host(ranks, **options):
    gpus = "0" if ranks == 1 else f"0-{ranks - 1}"
    return trlow.Settings(device="host", gpus=gpus, **{"deadline_s": 20.0, **options})


# ------------------------------------------------------------------------------ what is trained


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def convnet():
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2))
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, CLASSES))


class Encoder(nn.Module):
    """Token numbers to classes: an embedding, two layers, a mean over places."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def transformer():
    torch.manual_seed(0)
    return Encoder()


def cross_entropy(module, batch):
    data, labels = batch
    return nn.functional.cross_entropy(module(data).float(), labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(steps, rows=16, shape=(8,), seed=1):
    """Labels follow from the data, so there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        data = torch.randn(rows, *shape, generator=generator)
        found.append((data, data.flatten(1)[:, :CLASSES].argmax(1)))
    return found


def token_batches(steps, rows=16):
    """Every token of a row is the row's label modulo the number of classes."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        found.append(
            (torch.randint(8, (rows, 6), generator=generator) * CLASSES + labels[:, None], labels)
        )
    return found


# ------------------------------------------------------------------------------ ways to train it


def plain(factory, optimizer, given, *, clip=None, schedule=None):
    """Plain torch on whole batches: losses, and the state at the end."""
    module = factory().train()
    stepping = optimizer(module.parameters())
    scheduler = schedule(stepping) if schedule else None
    losses = []
    for batch in given:
        stepping.zero_grad()
        loss = cross_entropy(module, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        stepping.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def trained(static, given):
    """Losses of a step for each batch; compiled where that has not been done."""
    if not compiled(static):
        static.compile(given[0])
    losses = [static.step(batch) for batch in given]
    return [loss.item() for loss in losses]


def compiled(static):
    return static._captured is not None


def assert_close(mine, other, tolerance=WEIGHTS):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor, other[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same(mine, other):
    """Bit for bit, with names."""
    assert mine.keys() == other.keys()
    differ = [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])]
    assert not differ


def assert_ranks_same(static):
    first, *others = (module.state_dict() for module in static.modules())
    for other in others:
        assert_same(first, other)


def interrupted_code():
    """Of plain torch after Ctrl-C: -SIGINT, or 1.

    It is 1 where tabulate is installed: torch imports it as Python ends, which clears Python's note
    of the interrupt.
    """
    text = "import torch, torch._dynamo; torch.compile(lambda x: x + 1, backend='eager')"
    text += "(torch.ones(1)); raise KeyboardInterrupt"
    command = [sys.executable, "-c", text]
    code = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
    assert code in {-signal.SIGINT, 1}
    return code
