"""The two models of the command line, as layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from trlow.nn.layers import Sequential, bn, conv, fc, flatten, gap, maxpool, relu, seq


def cnn(classes: int = 10) -> Sequential:
    """Three convolutions with batch norm; the pool waits for the second: digits are small."""
    return seq(
        conv(16, 3), bn(), relu(),
        conv(32, 3), bn(), relu(),
        maxpool(2),
        conv(64, 3), bn(), relu(),
        gap(),
        fc(classes),
    )  # fmt: skip


def mlp(classes: int = 10) -> Sequential:
    """Three fully connected layers on the flattened image."""
    return seq(flatten(), fc(128), relu(), fc(64), relu(), fc(classes))


MODELS: Mapping[str, Callable[[int], Sequential]] = MappingProxyType({"cnn": cnn, "mlp": mlp})
