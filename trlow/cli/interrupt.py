"""Ctrl-C where `main` does not run yet, or no longer: one line and exit code 130.

Importing this replaces Python's traceback of an interrupt in trlow's own process, and in no other,
so it is imported before everything that takes a while.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from types import TracebackType

EXIT_INTERRUPTED = 130
MESSAGE = "interrupted"


def is_own_process(program: str) -> bool:
    """Whether a process with this argv[0] is `trlow` or `python -m trlow`."""
    path = PurePath(program)
    return path.stem == "trlow" or path.parts[-2:] == ("trlow", "__main__.py")


def ignore_more() -> None:
    """Let a second Ctrl-C do nothing: the process ends already, and in order."""
    if is_own_process(sys.argv[0]):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # CPython remembers an interrupt inside exec() of text, as dataclasses have it, and would
        # end the process by the signal although it was caught; the next exec() forgets it.
        exec("")  # noqa: S102


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    ignore_more()
    print(f"trlow: error: {MESSAGE}", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)  # returning would end the process by the signal


if is_own_process(sys.argv[0]):
    sys.excepthook = _say
