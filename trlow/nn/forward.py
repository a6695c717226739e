"""The forward pass as range operations: one kernel launch each, batch norm in training takes two.

`View` answers the question every layer asks: where is this name, and how large is it, in the slot
and variant at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trlow.nn.layers import (
    BatchNorm,
    Conv,
    Flatten,
    FullyConnected,
    GlobalAveragePool,
    Layer,
    MaxPool,
    Relu,
    Shape,
)
from trlow.nn.network import INPUTS, LABEL, SCALARS, Network, Node
from trlow.nn.placement import PREDICTED, RESULT
from trlow.plan import MemoryPlan, Range
from trlow.range_op import Launch, RangeOp

_SLOTTED = frozenset((*INPUTS, *SCALARS))


@dataclass(frozen=True, slots=True)
class View:
    """A network in one input slot ("a" or "b") and one variant of a plan."""

    network: Network
    plan: MemoryPlan
    slot: str
    variant: str | None

    def range(self, name: str) -> Range:
        """Bytes of a tensor; inputs and host-written scalars are those of this slot."""
        return self.plan.range(f"{self.slot}.{name}" if name in _SLOTTED else name)

    def ranges(self, *names: str) -> tuple[Range, ...]:
        """Bytes of several tensors."""
        return tuple(self.range(name) for name in names)

    @property
    def rows(self) -> int:
        """Rows of a rank's batch."""
        return self.network.batch(self.variant)

    def shapes(self, node: Node) -> tuple[Shape, Shape]:
        """Shape of one row at the layer's input and output."""
        shapes = self.network.shapes(self.variant)
        return shapes[node.index], shapes[node.index + 1]


def kernel(
    name: str,
    *,
    writes: tuple[Range, ...],
    reads: tuple[Range, ...],
    sizes: tuple[int, ...],
    work: int,
    adds: int = 0,
) -> RangeOp:
    """One launch of a model kernel, whose arguments are outputs, inputs, sizes in this order.

    It adds to the first `adds` outputs and overwrites the others.
    """
    launch = Launch(name, (*writes, *reads, *sizes), work)
    return RangeOp(name, (*reads, *writes[:adds]), writes, (launch,))


def forward(view: View, nodes: tuple[Node, ...], *, training: bool) -> tuple[RangeOp, ...]:
    """Forward of some layers; batch norm by the batch's statistics if `training`, else running."""
    ops: list[RangeOp] = []
    for node in nodes:
        if isinstance(node.layer, BatchNorm):
            ops += _bn_training(view, node) if training else _bn_inference(view, node)
        else:
            ops += _FORWARD[type(node.layer)](view, node, node.layer)
    return tuple(ops)


def loss(view: View) -> RangeOp:
    """Softmax cross-entropy of the last output: metrics, predicted labels, the logits' gradient."""
    last = view.network.nodes[-1]
    classes = view.shapes(last)[1][-1]
    return kernel(
        "softmax_xent",
        writes=view.ranges(RESULT, f"grad.{last.y}", PREDICTED),
        reads=view.ranges(last.y, LABEL, "rows"),
        sizes=(view.rows, classes),
        work=1,
    )


def conv_sizes(view: View, node: Node, layer: Conv) -> tuple[int, ...]:
    """n, h, width, cin, ho, wo, cout, kh, kw, stride, pad."""
    source, target = view.shapes(node)
    return (view.rows, *source, *target, layer.k, layer.k, layer.stride, layer.padding)


def pool_sizes(view: View, node: Node, layer: MaxPool) -> tuple[int, ...]:
    """n, h, width, c, ho, wo, k, stride."""
    source, target = view.shapes(node)
    return (view.rows, *source, *target[:2], layer.k, layer.step)


def mean_sizes(view: View, node: Node) -> tuple[int, ...]:
    """n, h*w, c of a global average pool's input."""
    height, width, channels = view.shapes(node)[0]
    return (view.rows, height * width, channels)


def norm_sizes(view: View, node: Node) -> tuple[int, ...]:
    """Rows and channels of a batch norm: every place of every image is a row."""
    shape = view.shapes(node)[0]
    return (view.rows * math.prod(shape[:-1]), shape[-1])


def count(view: View, node: Node) -> int:
    """Elements of a layer's output."""
    return view.rows * math.prod(view.shapes(node)[1])


def _conv(view: View, node: Node, layer: Conv) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "conv2d_fwd",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x, f"{node.label}.weight"),
            sizes=conv_sizes(view, node, layer),
            work=count(view, node),
        ),
    )


def _bn_training(view: View, node: Node) -> tuple[RangeOp, ...]:
    name, sizes = node.label, norm_sizes(view, node)
    batch = view.ranges(f"batch.{name}.mean", f"batch.{name}.rstd")
    running = view.ranges(f"next.{name}.mean", f"next.{name}.var")
    before = view.ranges(f"prev.{name}.mean", f"prev.{name}.var")
    return (
        kernel(
            "bn_stats",
            writes=(*batch, *running),
            reads=(*before, *view.ranges(node.x, "bn_momentum", "bn_eps")),
            sizes=sizes,
            work=sizes[1],
        ),
        kernel(
            "bn_apply",
            writes=view.ranges(node.y),
            reads=(
                view.range(node.x),
                *batch,
                *view.ranges(f"{name}.weight", f"{name}.bias"),
            ),
            sizes=sizes,
            work=count(view, node),
        ),
    )


def _bn_inference(view: View, node: Node) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "bn_apply_eq",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x, f"eq.{node.label}.scale", f"eq.{node.label}.bias"),
            sizes=norm_sizes(view, node),
            work=count(view, node),
        ),
    )


def _relu(view: View, node: Node, _: Relu) -> tuple[RangeOp, ...]:
    size = count(view, node)
    return (
        kernel(
            "relu_fwd",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x),
            sizes=(size,),
            work=size,
        ),
    )


def _maxpool(view: View, node: Node, layer: MaxPool) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "maxpool_fwd",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x),
            sizes=pool_sizes(view, node, layer),
            work=count(view, node),
        ),
    )


def _gap(view: View, node: Node, _: GlobalAveragePool) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "avgpool_fwd",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x),
            sizes=mean_sizes(view, node),
            work=count(view, node),
        ),
    )


def _flatten(_view: View, _node: Node, _: Flatten) -> tuple[RangeOp, ...]:
    return ()


def _fc(view: View, node: Node, layer: FullyConnected) -> tuple[RangeOp, ...]:
    return (
        kernel(
            "fc_fwd",
            writes=view.ranges(node.y),
            reads=view.ranges(node.x, f"{node.label}.weight", f"{node.label}.bias"),
            sizes=(view.rows, view.shapes(node)[0][-1], layer.cout),
            work=count(view, node),
        ),
    )


_FORWARD: Mapping[type[Layer], Callable[[View, Node, Any], tuple[RangeOp, ...]]] = MappingProxyType(
    {
        Conv: _conv,
        Relu: _relu,
        MaxPool: _maxpool,
        GlobalAveragePool: _gap,
        Flatten: _flatten,
        FullyConnected: _fc,
    }
)
