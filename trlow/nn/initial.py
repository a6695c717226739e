"""Initial values of everything persistent, as host arrays of rank 0; a broadcast does the rest.

Weights are He normal (He et al., 2015): deviation sqrt(2 / fan_in). Each parameter has its own
Philox stream, keyed by the seed and its position in the model, so that adding a layer behind
changes nothing before.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trlow.nn.compiler import Compiled
from trlow.nn.network import Parameter

FloatArray: TypeAlias = NDArray[np.float32]
SEED_BITS = 64


def initial_state(compiled: Compiled, seed: int) -> dict[str, FloatArray]:
    """Values by tensor name: parameters, moments, running statistics, batch norm for inference."""
    state: dict[str, FloatArray] = {}
    for position, parameter in enumerate(compiled.parameters):
        state[parameter.name] = initial_parameter(parameter, seed, position)
        if parameter.moment in compiled.plan:
            state[parameter.moment] = np.zeros(parameter.shape, np.float32)
    for node in compiled.network.norms:
        shape = state[f"{node.label}.bias"].shape
        for when in ("prev", "next"):
            state[f"{when}.{node.label}.mean"] = np.zeros(shape, np.float32)
            state[f"{when}.{node.label}.var"] = np.ones(shape, np.float32)
        state[f"eq.{node.label}.scale"] = np.ones(shape, np.float32)
        state[f"eq.{node.label}.bias"] = np.zeros(shape, np.float32)
    return state


def initial_parameter(parameter: Parameter, seed: int, position: int) -> FloatArray:
    """He normal for weights, one for a batch norm's weight, zero for biases; float32."""
    if parameter.kind == "bn_weight":
        return np.ones(parameter.shape, np.float32)
    if parameter.kind in {"bn_bias", "fc_bias"}:
        return np.zeros(parameter.shape, np.float32)
    normal = philox(seed, position).standard_normal(parameter.shape, dtype=np.float32)
    return normal * np.float32(math.sqrt(2.0 / parameter.fan_in))


def philox(seed: int, stream: int) -> np.random.Generator:
    """A generator of its own for each (seed, stream)."""
    key: Any = np.array([seed % 2**SEED_BITS, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
