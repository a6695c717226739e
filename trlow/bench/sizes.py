"""Sizes of messages in bytes: read as nccl-tests reads them, stepped as it steps them."""

from __future__ import annotations

from trlow.errors import SettingsError

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_SIZES = 4096  # more is a slip of the step


def parse_size(option: str, text: str) -> int:
    """Bytes of "8", "64K", "512M" or "1G", in powers of 1024. Raises SettingsError."""
    number, unit = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1].upper()]
    if not (number.isascii() and number.isdigit()) or int(number) * unit == 0:
        raise SettingsError(
            f'{option} "{text}" is no size: give bytes above 0 such as 8, 64K, 512M or 1G'
        )
    return int(number) * unit


def sizes_between(least: int, most: int, factor: int | None, step: int | None) -> tuple[int, ...]:
    """Every size from `least` to `most`, times `factor` or plus `step`. Raises SettingsError."""
    if least > most:
        raise SettingsError(f"-b {least} is larger than -e {most}; the least size comes first")
    if factor is not None and factor < 2:
        raise SettingsError(f"-f {factor} never ends; give a factor of at least 2, or -i STEP")
    found = [least]
    while True:
        following = found[-1] * factor if factor is not None else found[-1] + (step or most)
        if following > most:
            return tuple(found)
        found.append(following)
        if len(found) > MOST_SIZES:
            raise SettingsError(
                f"more than {MOST_SIZES} sizes from {least} to {most}; give a larger -i, or -f 2"
            )


def short(nbytes: int) -> str:
    """`nbytes` as one would type it: "8", "64K", "512M"."""
    for letter, unit in reversed(UNITS.items()):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
