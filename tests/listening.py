"""What this process listens on, from the kernel's own tables; for scripts that tests start."""

from __future__ import annotations

import socket
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


def address(text: str) -> str:
    """'0100007F:1F90' is '127.0.0.1'; words of four bytes, each in the machine's order."""
    digits = bytes.fromhex(text.partition(":")[0])
    words = b"".join(digits[at : at + 4][::-1] for at in range(0, len(digits), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
