"""The models that bench/torch_ddp.py trains: one definition for every side.

A model is a sequence of named regions, so that "compile" can mean the whole module or each region:
one compiled backward gives all its gradients at its very end, and only regions leave something to
overlap. No dropout: a captured step draws no random numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]
Optimizer = torch.optim.Optimizer

WARM_STEPS = 12  # of every side; DDP wants at least 11 before a capture
BATCHES = 2  # of every side and rank, used in turn


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy over classes; of a sequence, over all its places."""
    inputs, targets = batch
    logits = module(inputs)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


# ------------------------------------------------------------------------------ modules


class Region(nn.Sequential):
    """Modules in turn. The forward stands here, since ``Module.compile`` steps over torch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What one module returns, the next one takes."""
        for part in self:
            x = part(x)
        return x


def mlp(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return nn.Sequential(OrderedDict(layers=Region(*layers[:-1])))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the stride is in the middle one, as in torchvision."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, channels, height, width in and out."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet(depths: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-50 for depths (3, 4, 6, 3), layer by layer what torchvision's is."""
    regions: OrderedDict[str, nn.Module] = OrderedDict()
    first = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, 2, padding=1)
    regions["stem"] = Region(first, nn.BatchNorm2d(64), nn.ReLU(inplace=True), pool)
    channels = 64
    for k, depth in enumerate(depths):
        width, blocks = 64 << k, []
        for block in range(depth):
            stride = 2 if k and not block else 1
            blocks.append(Bottleneck(channels, width, stride))
            channels = 4 * width
        regions[f"layer{k + 1}"] = Region(*blocks)
    regions["head"] = Region(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for part in nn.Sequential(regions).modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(regions)


def vgg16_bn(widths: tuple[int, ...], hidden: int, classes: int) -> nn.Module:
    """VGG16-BN as torchvision has it, its two dropouts left out."""
    regions: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for k, (width, convolutions) in enumerate(zip(widths, (2, 2, 3, 3, 3), strict=True)):
        layers: list[nn.Module] = []
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True)]
            channels = width
        regions[f"block{k}"] = Region(*layers, nn.MaxPool2d(2))
    regions["head"] = Region(
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(channels * 49, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(regions)


class Layer(nn.Module):
    """One pre-norm encoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, places, width in and out."""
        rows, places, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, places, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, vocabulary: int, places: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(places, width) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows, places in; rows, places, width out."""
        return self.tokens(tokens) + self.places


def transformer(layers: int, width: int, heads: int, places: int, vocabulary: int) -> nn.Module:
    """An encoder that names the token at each place; the last layer is not tied to the first."""
    regions: OrderedDict[str, nn.Module] = OrderedDict()
    regions["embedding"] = Embedding(vocabulary, places, width)
    for k in range(layers):
        regions[f"layer{k}"] = Layer(width, heads)
    regions["head"] = Region(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return nn.Sequential(regions)


# ------------------------------------------------------------------------------ data, optimizers


def rows(shape: tuple[int, ...], classes: int) -> Callable[[int, torch.Generator], Batch]:
    """Random numbers in a shape, and a class for each row."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn((batch, *shape), generator=generator)
        return inputs, torch.randint(classes, (batch,), generator=generator)

    return draw


def tokens(places: int, vocabulary: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(batch: int, generator: torch.Generator) -> Batch:
        inputs, targets = torch.randint(vocabulary, (2, batch, places), generator=generator)
        return inputs, targets

    return draw


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=True)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


@dataclass(frozen=True, slots=True)
class Model:
    """What every side trains."""

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    batch: int  # rows on each GPU
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    images: bool = False  # channels_last

    def factory(self, compiled: str = "") -> nn.Module:
        """The module with the same weights each time; `compiled` is "", "whole" or "regional"."""
        torch.manual_seed(0)
        module = self.build()
        if self.images:
            module = module.to(memory_format=torch.channels_last)
        if compiled == "regional":
            for region in module.children():
                # In place: names and state dict stay. Regions share the code of one forward; torch
                # would take their other shapes for dynamic ones, whose kernels are slower.
                region.compile(dynamic=False)
        return torch.compile(module, dynamic=False) if compiled == "whole" else module

    def batches(self, rank: int, count: int) -> list[Batch]:
        """This rank's batches, on the host; the same on every side."""
        generator = torch.Generator().manual_seed(1 + rank)
        return [self.laid_out(self.draw(self.batch, generator)) for _ in range(count)]

    def laid_out(self, batch: Any) -> Batch:
        """As the module wants it in memory."""
        inputs, targets = batch
        if self.images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets


def image_model(build: Callable[[], nn.Module], size: int, classes: int, batch: int) -> Model:
    return Model(build, rows((3, size, size), classes), batch, sgd, images=True)


def model_of(name: str, *, tiny: bool) -> Model:
    """A model by name; tiny ones have the same parts and take a moment on a CPU."""
    widths = (784, 32, 16, 10) if tiny else (784, 1024, 512, 256, 10)
    vgg = ((8, 8, 8, 16, 16), 32, 10) if tiny else ((64, 128, 256, 512, 512), 4096, 1000)
    layers = (2, 32, 4, 16, 64) if tiny else (12, 512, 8, 256, 8192)
    depths, classes, size = ((1, 1, 1, 1), 10, 32) if tiny else ((3, 4, 6, 3), 1000, 224)

    def few(batch: int) -> int:
        return 4 if tiny else batch

    return {
        "mlp": lambda: Model(lambda: mlp(widths), rows((784,), 10), few(200), adamw),
        "resnet50_32": lambda: image_model(lambda: resnet(depths, classes), size, classes, few(32)),
        "resnet50_256": lambda: image_model(
            lambda: resnet(depths, classes), size, classes, few(256)
        ),
        "vgg16_bn": lambda: image_model(lambda: vgg16_bn(*vgg), size, classes, few(128)),
        "transformer": lambda: Model(
            lambda: transformer(*layers), tokens(*layers[3:]), few(16), adamw
        ),
    }[name]()
