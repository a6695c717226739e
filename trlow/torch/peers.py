"""How gradients get from rank to rank: NCCL's all-reduce, or copy engines between two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trlow.errors import UsageError
from trlow.torch.work import check_choice
from trlow.transport import no_link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.device import Platform

EXCHANGES = ("auto", "nccl", "copy")


def ranks_copy(
    asked: str, platform: Platform, devices: Sequence[int], arena: str, transport: str
) -> bool:
    """Whether ranks copy their gradients to each other, by a ``transport``.

    "auto" is "copy" where a GPU can do it, else "nccl". Raises ``UsageError`` for "copy" where it
    cannot be.
    """
    check_choice("exchange", asked, EXCHANGES)
    if asked == "nccl":
        return False
    reason = _hindrance(platform, devices, arena, transport)
    if asked == "copy" and reason is not None:
        raise UsageError(f"exchange='copy': {reason}; use 'nccl' or 'auto'")
    return reason is None and (asked == "copy" or platform.name != "host")


def _hindrance(
    platform: Platform, devices: Sequence[int], arena: str, transport: str
) -> str | None:
    if len(devices) != 2:
        return f"it is for two ranks, not {len(devices)}: of N each would send its own N - 1 times"
    if arena == "window":
        return "a window is for NCCL's own kernels"
    return no_link(platform, devices) if transport == "peer" else None
