"""A model bound to names and sizes: which parameters there are, and where the first layer ends.

The FIRST layer is the first convolution or fully connected layer: its backward is the last thing
a step computes, so its gradient is the last to be ready. All other layers are deep.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from trlow.errors import ModelError
from trlow.nn.layers import (
    NAMES,
    BatchNorm,
    Conv,
    Flatten,
    FullyConnected,
    Layer,
    Sequential,
    Shape,
)

DATA, LABEL = "data", "label"
INPUTS = (DATA, LABEL)
SCALARS = (
    "lr",
    "mu",
    "weight_decay",
    "grad_scale",
    "metric_scale",
    "rows",
    "bn_momentum",
    "bn_eps",
    "inv_world",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Another batch size or resolution of the same model, over the same offsets."""

    name: str
    local_batch: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained tensor; `family` is the key of its regions.

    `kind` is conv, fc_weight, fc_bias, bn_weight or bn_bias.
    """

    name: str
    layer: int
    kind: str
    family: str
    shape: Shape
    fan_in: int
    trainable: bool

    @property
    def gradient(self) -> str:
        """Name of its gradient's DTensor."""
        return f"grad.{self.name}"

    @property
    def moment(self) -> str:
        """Name of its moment's DTensor, which only a plan for an optimizer with momentum has."""
        return f"moment.{self.name}"

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to convolutions and fully connected weights alone."""
        return self.kind in {"conv", "fc_weight"}


@dataclass(frozen=True, slots=True)
class Node:
    """One layer with the activations it reads (x) and writes (y); a flatten's y is its x."""

    index: int
    layer: Layer
    x: str
    y: str

    @property
    def label(self) -> str:
        """Kind and index, the prefix of its tensors: conv0, bn1."""
        return f"{NAMES[type(self.layer)]}{self.index}"


@dataclass(frozen=True)
class Network:
    """A model with its input shape (h, w, c), rows per rank, variants and frozen layer indices."""

    model: Sequential
    input_shape: Shape
    local_batch: int
    variants: tuple[Variant, ...] = ()
    frozen: frozenset[int] = frozenset()
    deep_fc: bool = False  # the table has regions for fully connected layers behind the first layer

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """One node a layer, in order."""
        nodes = []
        x = DATA
        for index, layer in enumerate(self.model.layers):
            y = x if isinstance(layer, Flatten) else f"out.{NAMES[type(layer)]}{index}"
            nodes.append(Node(index, layer, x, y))
            x = y
        return tuple(nodes)

    @cached_property
    def first(self) -> int:
        """Index of the first layer."""
        return next(
            i for i, n in enumerate(self.model.layers) if isinstance(n, Conv | FullyConnected)
        )

    @cached_property
    def norms(self) -> tuple[Node, ...]:
        """The batch norms."""
        return tuple(node for node in self.nodes if isinstance(node.layer, BatchNorm))

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, in layer order."""
        shapes = self.shapes(None)
        return tuple(p for node in self.nodes for p in self._of(node, shapes[node.index]))

    @cached_property
    def lowest_trained(self) -> int:
        """Index of the lowest layer with a trained parameter; no gradient goes below it."""
        trained = [p.layer for p in self.parameters if p.trainable]
        return min(trained, default=len(self.nodes))

    @property
    def frozen_gradients(self) -> frozenset[str]:
        """Names of the gradients that nobody writes."""
        return frozenset(p.gradient for p in self.parameters if not p.trainable)

    def batch(self, variant: str | None) -> int:
        """Rows of one rank's batch."""
        return self.local_batch if variant is None else self._variant(variant).local_batch

    def shapes(self, variant: str | None) -> tuple[Shape, ...]:
        """Shape of one row at the input and behind each layer."""
        if variant is None:
            return self.model.shapes(self.input_shape)
        chosen = self._variant(variant)
        return self.model.shapes((chosen.height, chosen.width, *self.input_shape[2:]))

    def _variant(self, name: str) -> Variant:
        return next(v for v in self.variants if v.name == name)

    def _of(self, node: Node, shape: Shape) -> tuple[Parameter, ...]:
        layer, label, cin = node.layer, node.label, shape[-1]
        trainable = node.index not in self.frozen
        first = node.index == self.first

        def make(what: str, kind: str, family: str, dims: Shape, fan_in: int) -> Parameter:
            return Parameter(f"{label}.{what}", node.index, kind, family, dims, fan_in, trainable)

        if isinstance(layer, Conv):
            dims = (layer.k, layer.k, cin, layer.cout)
            family = "FIRST_CONV" if first else "DEEP_CONV"
            return (make("weight", "conv", family, dims, math.prod(dims[:3])),)
        if isinstance(layer, FullyConnected):
            deep = "DEEP_" if self.deep_fc and not first else ""
            return (
                make("weight", "fc_weight", f"{deep}FC_WEIGHT", (cin, layer.cout), cin),
                make("bias", "fc_bias", f"{deep}FC_BIAS", (layer.cout,), cin),
            )
        if isinstance(layer, BatchNorm):
            return (
                make("weight", "bn_weight", "BN_WEIGHT", (cin,), 1),
                make("bias", "bn_bias", "BN_BIAS", (cin,), 1),
            )
        return ()


def check_network(network: Network) -> None:
    """Raise ModelError unless sizes, all variants' shapes, frozen indices and batch norms fit."""
    _check_sizes(network)
    network.model.classes(network.input_shape)
    if not any(isinstance(n, Conv | FullyConnected) for n in network.model.layers):
        raise ModelError("the model has nothing to learn a class with: add a conv() or an fc()")
    _check_frozen(network)
    _check_norms(network)
    for variant in network.variants:
        _check_variant(network, variant)


def _check_sizes(network: Network) -> None:
    names = [variant.name for variant in network.variants]
    if len(set(names)) != len(names) or not all(names):
        raise ModelError(f"variants {names}: names must be distinct and not empty")
    sizes: dict[str, object] = {"local_batch": network.local_batch}
    for variant in network.variants:
        for field in ("local_batch", "height", "width"):
            sizes[f"variant {variant.name}: {field}"] = getattr(variant, field)
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelError(f"{name}={size!r} must be an integer of at least 1")
    if network.variants and len(network.input_shape) != 3:
        raise ModelError(
            f"input shape {network.input_shape}: variants of height and width want (h, w, channels)"
        )


def _check_frozen(network: Network) -> None:
    layers = network.model.layers
    for index in sorted(network.frozen):
        if not 0 <= index < len(layers):
            raise ModelError(
                f"frozen layer {index}: the model has the layers 0 to {len(layers) - 1}"
            )
        if not isinstance(layers[index], Conv | FullyConnected | BatchNorm):
            raise ModelError(
                f"frozen layer {index} is {NAMES[type(layers[index])]}, which has no parameters"
            )


def _check_norms(network: Network) -> None:
    for node in network.norms[1:]:
        if node.layer != network.norms[0].layer:
            raise ModelError(
                f"layers {network.norms[0].index} and {node.index}: {network.norms[0].layer} and "
                f"{node.layer} differ, but one momentum and one eps serve all batch norms of a "
                "model: make them equal"
            )


def _check_variant(network: Network, variant: Variant) -> None:
    main = network.shapes(None)
    for node, wanted, got in zip(network.nodes, main, network.shapes(variant.name), strict=False):
        if isinstance(node.layer, Conv | BatchNorm | FullyConnected) and wanted[-1] != got[-1]:
            raise ModelError(
                f"layer {node.index} {NAMES[type(node.layer)]}: variant {variant.name} brings the "
                f"shape {got}, but its parameters fit {wanted}: pool globally (gap) before it, or "
                "keep the resolution"
            )


def network_of(
    model: Sequential,
    *,
    input_shape: Shape,
    local_batch: int,
    variants: Collection[Variant] = (),
    frozen: Collection[int] = (),
    deep_fc: bool = False,
) -> Network:
    """A checked network; ModelError as `check_network` says."""
    network = Network(
        model, tuple(input_shape), local_batch, tuple(variants), frozenset(frozen), deep_fc
    )
    check_network(network)
    return network
