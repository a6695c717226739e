"""How gradients get from rank to rank: NCCL's all-reduce, or copy engines between two ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trlow.errors import UsageError
from trlow.torch.work import check_choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trlow.device import Platform

EXCHANGES = ("auto", "nccl", "copy")
NO_PEERS = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}


def ranks_copy(asked: str, platform: Platform, devices: Sequence[int], arena: str) -> bool:
    """Whether ranks copy their gradients to each other.

    "auto" is "copy" where a GPU can do it, else "nccl". Raises ``UsageError`` for "copy" where it
    cannot be.
    """
    check_choice("exchange", asked, EXCHANGES)
    if asked == "nccl":
        return False
    reason = _hindrance(platform, devices, arena, os.environ)
    if asked == "copy" and reason is not None:
        raise UsageError(f"exchange='copy': {reason}; use 'nccl' or 'auto'")
    return reason is None and (asked == "copy" or platform.name != "host")


def _hindrance(
    platform: Platform, devices: Sequence[int], arena: str, environment: Mapping[str, str]
) -> str | None:
    if len(devices) != 2:
        return f"it is for two ranks, not {len(devices)}: of N each would send its own N - 1 times"
    if arena == "window":
        return "a window is for NCCL's own kernels"
    if platform.name != "host":
        for name, values in NO_PEERS.items():
            if environment.get(name) in values:
                return f"{name}={environment[name]} says that GPUs may not reach each other"
    for device, peer in (devices, devices[::-1]):
        if not platform.reaches(device, peer):
            return f"device {device} does not reach the memory of device {peer} over NVLink"
    return None
