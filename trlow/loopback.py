"""Keeping what NCCL listens on to the loopback interface.

NCCL opens sockets on the interface that NCCL_SOCKET_IFNAME chooses when an id or a communicator is
made (the bootstrap, its proxies, and any socket transport), and the listener of its RAS service
there and on NCCL_RAS_ADDR. NCCL_OOB_NET_ENABLE would move the bootstrap to a network plugin, and
NCCL_COMM_ID to an address of its own. NCCL reads each of them once in a process. So they are set
before its first use through trlow, stay set, and cannot be asked for later. What another user of
the same library in this process does with it is not seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trlow.errors import SettingsError
from trlow.settings import set_variables, variables_in_effect

IFF_LOOPBACK = 0x8  # linux/if.h
_REMEDY = "or set loopback_only=False (TRLOW_LOOPBACK_ONLY=0)"

_at_first_use: dict[str, str] | None = None  # the variables that this process's NCCL has read


def confine() -> None:
    """Set the variables, before NCCL's first use. Raises ``SettingsError`` where they cannot be.

    That is where the user set one otherwise, or NCCL was used in this process without them.
    """
    wanted = _variables(_interface())
    have = variables_in_effect() if _at_first_use is None else _at_first_use
    if "NCCL_COMM_ID" in have:
        raise SettingsError(
            f"NCCL_COMM_ID={have['NCCL_COMM_ID']!r} makes NCCL listen on that address, but "
            f"loopback_only is set; unset it, {_REMEDY}"
        )
    for name, accepted in wanted.items():
        if name in have and have[name] not in accepted:
            raise SettingsError(
                f"{name}={have[name]!r} is set, but loopback_only needs {accepted[0]!r}; unset it, "
                f"{_REMEDY}"
            )
    missing = {name: accepted[0] for name, accepted in wanted.items() if name not in have}
    if missing and _at_first_use is not None:
        raise SettingsError(
            "loopback_only comes too late: NCCL was used in this process without it, and reads "
            f"{', '.join(missing)} only once; set it in the process's first Settings, {_REMEDY}"
        )
    set_variables(missing)


def note_first_use() -> None:
    """NCCL is about to be used in this process: what is not set by now is too late."""
    global _at_first_use  # NCCL's own state is the process's, too
    if _at_first_use is None:
        _at_first_use = variables_in_effect()


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
