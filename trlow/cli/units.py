"""Numbers as a person reads them."""

from __future__ import annotations


def binary(nbytes: int) -> str:
    """Return `nbytes` in the largest of B, KiB, MiB, GiB that leaves at least 1."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.2f} GiB"
