"""Options that were given: what was not is left to the environment and the settings' defaults."""

from __future__ import annotations

import argparse
from typing import Any


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the names that the command line has, with their values."""
    return {name: getattr(arguments, name) for name in names if name in arguments}
