"""Keeping what NCCL listens on to the loopback interface.

NCCL opens sockets on the interface that NCCL_SOCKET_IFNAME chooses when an id or a communicator is
made (the bootstrap, its proxies, and any socket transport), and the listener of its RAS service
there and on NCCL_RAS_ADDR. NCCL_OOB_NET_ENABLE would move the bootstrap to a network plugin, and
NCCL_COMM_ID to an address of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trlow.errors import SettingsError
from trlow.nccl_variables import in_effect, missing_for, remedy

IFF_LOOPBACK = 0x8  # linux/if.h
FIELD = ("loopback_only", "False")


def missing() -> dict[str, str]:
    """What has to be set before NCCL's first use. Raises ``SettingsError`` where it cannot be."""
    have = in_effect()
    if "NCCL_COMM_ID" in have:
        raise SettingsError(
            f"NCCL_COMM_ID={have['NCCL_COMM_ID']!r} makes NCCL listen on that address, but "
            f"loopback_only is set; unset it, {remedy(*FIELD)}"
        )
    return missing_for(*FIELD, _variables(_interface()))


def _variables(interface: str) -> Mapping[str, tuple[str, ...]]:
    """Each variable with the values that will do; the first is the one that is set."""
    return {
        "NCCL_SOCKET_IFNAME": (f"={interface}", interface),  # = is the exact name, not a prefix
        "NCCL_RAS_ENABLE": ("0",),
        "NCCL_OOB_NET_ENABLE": ("0",),
    }


def _interface() -> str:
    """The name of the loopback interface."""
    for flags in sorted(Path("/sys/class/net").glob("*/flags")):
        if int(flags.read_text(encoding="ascii"), 16) & IFF_LOOPBACK:
            return flags.parent.name
    return "lo"
