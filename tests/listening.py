"""What this process listens on, from the kernel's own tables; for scripts that tests start."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # states; UDP: bound


def listening() -> list[str]:
    """The addresses of every TCP socket that listens, and of every UDP socket that is bound."""
    mine = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(file.readlink()))
        except OSError:
            continue  # the descriptor that lists the folder
    found = []
    for table, state in LISTENING.items():
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and f"socket:[{words[9]}]" in mine:
                found.append(address(words[1]))
    return sorted(found)


def others() -> list[str]:
    """The IPv4 addresses of this machine that are not the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s240x", name.encode())
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # it has none
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def address(text: str) -> str:
    """'0100007F:1F90' is '127.0.0.1'; words of four bytes, each in the machine's order."""
    digits = bytes.fromhex(text.partition(":")[0])
    words = b"".join(digits[at : at + 4][::-1] for at in range(0, len(digits), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
