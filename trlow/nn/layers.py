"""Layers as frozen data, and the shapes they give.

A model is a `Sequential` of layers; it holds no memory and no numbers beside its hyper-
parameters. Shapes are those of ONE row, channels last: (height, width, channels) or (features,).
Convolutions have no bias: a batch norm behind them would cancel it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from trlow.errors import ModelError

Shape: TypeAlias = tuple[int, ...]
IMAGE_RANK = 3


@dataclass(frozen=True, slots=True)
class Conv:
    """Cross-correlation, k by k, without bias. `pad` None keeps height and width at stride 1."""

    cout: int
    k: int
    stride: int = 1
    pad: int | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for sizes that are not positive, and for an even k without pad."""
        for name in ("cout", "k", "stride"):
            _positive(self, name)
        if self.pad is None:
            if self.k % 2 == 0:
                raise ModelError(
                    f"{self}: an even k={self.k} has no symmetric same padding: give pad"
                )
        elif not _is_int(self.pad) or not 0 <= self.pad < self.k:
            raise ModelError(f"{self}: pad={self.pad!r} must be an integer in 0..k-1={self.k - 1}")

    @property
    def padding(self) -> int:
        """Zero rows and columns on each side."""
        return (self.k - 1) // 2 if self.pad is None else self.pad

    def output_shape(self, shape: Shape) -> Shape:
        """(h, w, c) to (ho, wo, cout)."""
        h, w, _ = _image(shape)
        ho, wo = (_windows(n + 2 * self.padding, self.k, self.stride) for n in (h, w))
        return (ho, wo, self.cout)


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """Batch norm over all rows and places of a channel; momentum is the weight of the new batch."""

    momentum: float = 0.1
    eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raise ModelError for momentum outside [0, 1] and for eps not positive and finite."""
        if not _is_real(self.momentum) or not 0 <= self.momentum <= 1:
            raise ModelError(f"bn: momentum={self.momentum!r} must lie in [0, 1]")
        if not _is_real(self.eps) or not 0 < self.eps < math.inf:
            raise ModelError(f"bn: eps={self.eps!r} must be positive and finite")

    def output_shape(self, shape: Shape) -> Shape:
        """The shape itself; its last axis is the channel."""
        return shape


@dataclass(frozen=True, slots=True)
class Relu:
    """max(x, 0)."""

    def output_shape(self, shape: Shape) -> Shape:
        """The shape itself."""
        return shape


@dataclass(frozen=True, slots=True)
class MaxPool:
    """The largest of each k by k window; without padding. `stride` None is k."""

    k: int
    stride: int | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for sizes that are no positive integers."""
        _positive(self, "k")
        if self.stride is not None:
            _positive(self, "stride")

    @property
    def step(self) -> int:
        """Distance of neighbouring windows."""
        return self.k if self.stride is None else self.stride

    def output_shape(self, shape: Shape) -> Shape:
        """(h, w, c) to (ho, wo, c)."""
        h, w, c = _image(shape)
        return (_windows(h, self.k, self.step), _windows(w, self.k, self.step), c)


@dataclass(frozen=True, slots=True)
class GlobalAveragePool:
    """The mean over height and width."""

    def output_shape(self, shape: Shape) -> Shape:
        """(h, w, c) to (c,)."""
        return (_image(shape)[2],)


@dataclass(frozen=True, slots=True)
class Flatten:
    """Height, width and channels as one axis; costs nothing, for it is the same memory."""

    def output_shape(self, shape: Shape) -> Shape:
        """(h, w, c) to (h*w*c,)."""
        return (math.prod(shape),)


@dataclass(frozen=True, slots=True)
class FullyConnected:
    """x @ weight[cin, cout] + bias[cout]."""

    cout: int

    def __post_init__(self) -> None:
        """Raise ModelError for a size that is no positive integer."""
        _positive(self, "cout")

    def output_shape(self, shape: Shape) -> Shape:
        """(cin,) to (cout,)."""
        if len(shape) != 1:
            raise _ShapeMisfitError("(features,): put gap() or flatten() in front")
        return (self.cout,)


Layer: TypeAlias = Conv | BatchNorm | Relu | MaxPool | GlobalAveragePool | Flatten | FullyConnected
NAMES: dict[type, str] = {
    Conv: "conv",
    BatchNorm: "bn",
    Relu: "relu",
    MaxPool: "maxpool",
    GlobalAveragePool: "gap",
    Flatten: "flatten",
    FullyConnected: "fc",
}


@dataclass(frozen=True, slots=True)
class Sequential:
    """Layers one behind the other."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        """Raise ModelError for an empty model and for what is no layer of this module."""
        if not self.layers:
            raise ModelError("a model needs at least one layer, got none")
        for index, layer in enumerate(self.layers):
            if type(layer) not in NAMES:
                raise ModelError(
                    f"layer {index}: {layer!r} is not a layer; "
                    f"known are {', '.join(NAMES.values())}"
                )

    def shapes(self, input_shape: Shape) -> tuple[Shape, ...]:
        """Shapes of one row: the input's, then each layer's output, so one more than layers.

        Raises ModelError naming the layer's index, its input shape and what it wants or would give.
        """
        if not input_shape or not all(_is_int(n) and n > 0 for n in input_shape):
            raise ModelError(f"input shape {input_shape!r}: dimensions must be positive integers")
        shapes = [tuple(input_shape)]
        for index, layer in enumerate(self.layers):
            here = f"layer {index} {NAMES[type(layer)]}: input shape {shapes[-1]}"
            try:
                shape = layer.output_shape(shapes[-1])
            except _ShapeMisfitError as misfit:
                raise ModelError(f"{here} does not fit, it wants {misfit}") from None
            if min(shape) < 1:
                raise ModelError(
                    f"{here} would give {shape}: the window is larger than the padded input; "
                    f"use a smaller window or stride, or a larger input"
                )
            shapes.append(shape)
        return tuple(shapes)

    def classes(self, input_shape: Shape) -> int:
        """Number of classes; ModelError where the last layer gives not (classes,) or only one."""
        last = self.shapes(input_shape)[-1]
        if len(last) != 1 or last[0] < 2:
            index = len(self.layers) - 1
            raise ModelError(
                f"layer {index} {NAMES[type(self.layers[index])]}: the model ends in the shape "
                f"{last}, but the loss wants (classes,) of at least 2: end with fc(classes)"
            )
        return last[0]


def seq(*items: Layer | Sequential) -> Sequential:
    """One model of layers and of other models' layers, in order."""
    layers: list[Layer] = []
    for item in items:
        layers.extend(item.layers if isinstance(item, Sequential) else (item,))
    return Sequential(tuple(layers))


def conv(cout: int, k: int, stride: int = 1, pad: int | None = None) -> Conv:
    """A k by k convolution to `cout` channels, same padding unless `pad` is given."""
    return Conv(cout, k, stride, pad)


def bn(momentum: float = 0.1, eps: float = 1e-5) -> BatchNorm:
    """Batch norm."""
    return BatchNorm(momentum, eps)


def relu() -> Relu:
    """Rectifier."""
    return Relu()


def maxpool(k: int, stride: int | None = None) -> MaxPool:
    """Max pool over k by k windows, `stride` k unless given."""
    return MaxPool(k, stride)


def gap() -> GlobalAveragePool:
    """Global average pool."""
    return GlobalAveragePool()


def flatten() -> Flatten:
    """(h, w, c) as (h*w*c,)."""
    return Flatten()


def fc(cout: int) -> FullyConnected:
    """Fully connected layer with bias."""
    return FullyConnected(cout)


class _ShapeMisfitError(Exception):
    """What a layer wants instead of the shape that it was given; becomes a ModelError."""


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != IMAGE_RANK:
        raise _ShapeMisfitError("(height, width, channels)")
    return (shape[0], shape[1], shape[2])


def _windows(size: int, k: int, stride: int) -> int:
    return (size - k) // stride + 1 if size >= k else 0


def _positive(layer: Layer, name: str) -> None:
    value = getattr(layer, name)
    if not _is_int(value) or value < 1:
        raise ModelError(f"{NAMES[type(layer)]}: {name}={value!r} must be an integer of at least 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
