"""Layers as data, and the compiler from a model to a plan and its programs. No device here."""

from trlow.nn.compiler import OPTIMIZERS, Compiled, compile_model
from trlow.nn.initial import initial_state
from trlow.nn.layers import Sequential, bn, conv, fc, flatten, gap, maxpool, relu, seq
from trlow.nn.models import MODELS, cnn, mlp
from trlow.nn.network import Parameter, Variant

__all__ = [
    "MODELS",
    "OPTIMIZERS",
    "Compiled",
    "Parameter",
    "Sequential",
    "Variant",
    "bn",
    "cnn",
    "compile_model",
    "conv",
    "fc",
    "flatten",
    "gap",
    "initial_state",
    "maxpool",
    "mlp",
    "relu",
    "seq",
]
