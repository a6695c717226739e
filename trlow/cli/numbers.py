"""What each number of the command line may be: argparse's types, whose errors say what to give."""

from __future__ import annotations

import argparse
import math


class whole:  # noqa: N801  argparse names a type in its messages by its name
    """A whole number of at least `least`."""

    def __init__(self, least: int) -> None:
        """Keep the limit."""
        self.least = least

    def __call__(self, text: str) -> int:
        """Return the number, or raise what argparse prints."""
        try:
            value = int(text)
        except ValueError:
            value = self.least - 1
        if value < self.least or not text.strip().lstrip("+").isdecimal():
            raise argparse.ArgumentTypeError(
                f'"{text}" is no whole number of at least {self.least}; give one'
            )
        return value


def seconds(text: str) -> float:
    """Return a time: finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f'"{text}" is no time; give a finite number of seconds above 0'
        )
    return value


def rate(text: str) -> float:
    """Return a learning rate: finite and at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(
            f'"{text}" is no learning rate; give a finite number of at least 0'
        )
    return value
