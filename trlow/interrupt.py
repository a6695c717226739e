"""Ctrl-C where `main` does not run yet, or no longer: one line and exit code 130.

Importing this changes what an interrupt does in trlow's own process, and in no other, so the
package imports it before everything that takes a while. While modules load the process ends at
once: as an exception the interrupt could turn into another error inside somebody else's import.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import TracebackType

EXIT_INTERRUPTED = 130
MESSAGE = "interrupted"


def is_own_process() -> bool:
    """Whether this process is `trlow` or `python -m trlow`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # so called while Python imports the package of the module that it runs
        # -m may end other flags, as in -Im
        pairs = pairwise(sys.orig_argv)
        names = (name for flag, name in pairs if flag.startswith("-") and flag.endswith("m"))
        return next(names, "") == "trlow"
    return f"/{program}".endswith(("/trlow", "/trlow/__main__.py"))


def hand_over() -> None:
    """Let Ctrl-C be an exception from here on: `main` runs, and catches it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_more() -> None:
    """Let a second Ctrl-C do nothing: the process ends already, and in order."""
    if is_own_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # CPython remembers an interrupt inside exec() of text, as dataclasses have it, and would
        # end the process by the signal although it was caught; the next exec() forgets it.
        exec("")  # noqa: S102


def _end(*_: object) -> None:
    ignore_more()
    sys.stderr.write(f"trlow: error: {MESSAGE}\n")
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)  # returning would go on, or end the process by the signal


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, traceback)


if is_own_process():
    sys.excepthook = _say
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _end)
