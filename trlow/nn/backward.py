"""The backward pass as range operations, from the loss down to the lowest trained layer.

Gradients of weights are added to what is there (they start cleared); gradients of activations are
overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trlow.nn.forward import (
    View,
    conv_sizes,
    count,
    kernel,
    mean_sizes,
    norm_sizes,
    pool_sizes,
)
from trlow.nn.layers import (
    BatchNorm,
    Conv,
    Flatten,
    FullyConnected,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Relu,
)
from trlow.nn.network import Node
from trlow.nn.placement import BN_SUMS
from trlow.range_op import RangeOp


def backward(view: View, nodes: tuple[Node, ...]) -> tuple[RangeOp, ...]:
    """Backward of some layers, last first; nothing for what lies below the lowest trained layer."""
    ops: list[RangeOp] = []
    for node in reversed(nodes):
        if node.index >= view.network.lowest_trained:
            ops += _BACKWARD[type(node.layer)](view, node, node.layer)
    return tuple(ops)


def _trained(view: View, node: Node) -> bool:
    return node.index not in view.network.frozen


def _flows_on(view: View, node: Node) -> bool:
    """Whether a layer below wants the gradient of this layer's input."""
    return node.index > view.network.lowest_trained


def _conv(view: View, node: Node, layer: Conv) -> tuple[RangeOp, ...]:
    sizes = conv_sizes(view, node, layer)
    n, h, w, cin = sizes[:4]
    ops = []
    if _trained(view, node):
        ops.append(
            kernel(
                "conv2d_bwd_weight",
                writes=view.ranges(f"grad.{node.label}.weight"),
                reads=view.ranges(node.x, f"grad.{node.y}"),
                sizes=sizes,
                work=layer.k * layer.k * cin * layer.cout,
                adds=1,
            )
        )
    if _flows_on(view, node):
        ops.append(
            kernel(
                "conv2d_bwd_data",
                writes=view.ranges(f"grad.{node.x}"),
                reads=view.ranges(f"grad.{node.y}", f"{node.label}.weight"),
                sizes=sizes,
                work=n * h * w * cin,
            )
        )
    return tuple(ops)


def _bn(view: View, node: Node, _: BatchNorm) -> tuple[RangeOp, ...]:
    name, sizes = node.label, norm_sizes(view, node)
    batch = view.ranges(f"batch.{name}.mean", f"batch.{name}.rstd")
    dy, x = view.ranges(f"grad.{node.y}", node.x)
    reduce = kernel(
        "bn_bwd_reduce",
        writes=view.ranges(f"grad.{name}.weight", f"grad.{name}.bias", BN_SUMS),
        reads=(dy, x, *batch),
        sizes=sizes,
        work=sizes[1],
        adds=2,
    )
    if not _flows_on(view, node):
        return (reduce,)
    data = kernel(
        "bn_bwd_data",
        writes=view.ranges(f"grad.{node.x}"),
        reads=(dy, x, *batch, *view.ranges(f"{name}.weight", BN_SUMS)),
        sizes=sizes,
        work=count(view, node),
    )
    return (reduce, data)


def _relu(view: View, node: Node, _: Relu) -> tuple[RangeOp, ...]:
    size = count(view, node)
    return (
        kernel(
            "relu_bwd",
            writes=view.ranges(f"grad.{node.x}"),
            reads=view.ranges(f"grad.{node.y}", node.y),
            sizes=(size,),
            work=size,
        ),
    )


def _maxpool(view: View, node: Node, layer: MaxPool) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "maxpool_bwd",
            writes=view.ranges(f"grad.{node.x}"),
            reads=view.ranges(f"grad.{node.y}", node.x),
            sizes=pool_sizes(view, node, layer),
            work=view.rows * math.prod(view.shapes(node)[0]),
        ),
    )


def _gap(view: View, node: Node, _: GlobalAveragePool) -> tuple[RangeOp, ...]:
    n, places, channels = mean_sizes(view, node)
    return (
        kernel(
            "avgpool_bwd",
            writes=view.ranges(f"grad.{node.x}"),
            reads=view.ranges(f"grad.{node.y}"),
            sizes=(n, places, channels),
            work=n * places * channels,
        ),
    )


def _flatten(_view: View, _node: Node, _: Flatten) -> tuple[RangeOp, ...]:
    return ()


def _fc(view: View, node: Node, layer: FullyConnected) -> tuple[RangeOp, ...]:
    n, cin, cout = view.rows, view.shapes(node)[0][-1], layer.cout
    dy, x = view.ranges(f"grad.{node.y}", node.x)
    ops = []
    if _trained(view, node):
        ops.append(
            kernel(
                "fc_bwd_weight",
                writes=view.ranges(f"grad.{node.label}.weight"),
                reads=(x, dy),
                sizes=(n, cin, cout),
                work=cin * cout,
                adds=1,
            )
        )
        ops.append(
            kernel(
                "fc_bwd_bias",
                writes=view.ranges(f"grad.{node.label}.bias"),
                reads=(dy,),
                sizes=(n, cout),
                work=cout,
                adds=1,
            )
        )
    if _flows_on(view, node):
        ops.append(
            kernel(
                "fc_bwd_data",
                writes=view.ranges(f"grad.{node.x}"),
                reads=(dy, view.range(f"{node.label}.weight")),
                sizes=(n, cin, cout),
                work=n * cin,
            )
        )
    return tuple(ops)


_BACKWARD: Mapping[type[Layer], Callable[[View, Node, Any], tuple[RangeOp, ...]]] = (
    MappingProxyType(
        {
            Conv: _conv,
            BatchNorm: _bn,
            Relu: _relu,
            MaxPool: _maxpool,
            GlobalAveragePool: _gap,
            Flatten: _flatten,
            FullyConnected: _fc,
        }
    )
)
