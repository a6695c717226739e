"""The command line: `python -m trlow`, or `trlow`.

`main` turns what was raised into one line on stderr and an exit code; the commands only raise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from trlow import interrupt
from trlow.cli.console import Console
from trlow.cli.parser import build
from trlow.cli.train import show_stall
from trlow.errors import SettingsError, TrlowError, UsageError
from trlow.version import __version__

__all__ = ["main"]

EXIT_RUNTIME = 1
EXIT_USAGE = 2

# Fields of Settings, as messages name them, that are options here.
OPTIONS = {
    "any_world_size": "--any-world-size",
    "allow_unabortable": "--allow-unabortable",
    "global_batch_size": "--global-batch-size",
}
FIELD = re.compile(r"(host_devices)=(\d+)|\b(" + "|".join(OPTIONS) + r")\b")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    try:
        interrupt.hand_over()
        arguments = build(__version__).parse_args(argv)
        code: int = arguments.run(arguments, Console(sys.stdout))
        sys.stdout.flush()
    except SettingsError as error:
        return _fail(_as_options(str(error)), EXIT_USAGE)
    except UsageError as error:
        return _fail(error, EXIT_USAGE)
    except TrlowError as error:
        code = _fail(error, EXIT_RUNTIME)
        show_stall(error)
        return code
    except KeyboardInterrupt:
        interrupt.ignore_more()
        return _fail(interrupt.MESSAGE, interrupt.EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_RUNTIME
    return code


def _as_options(message: str) -> str:
    """Name the options where a message names fields of Settings."""

    def option(found: re.Match[str]) -> str:
        if found[1]:
            return f"TRLOW_HOST_DEVICES={found[2]}, or train --ranks {found[2]}"
        return OPTIONS[found[3]]

    return FIELD.sub(option, message)


def _fail(problem: object, code: int) -> int:
    print(f"trlow: error: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
