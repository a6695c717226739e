"""The command line: `python -m trlow`, or `trlow`.

`main` turns what was raised into one line on stderr and an exit code; the commands only raise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trlow.cli.console import Console
from trlow.cli.parser import build
from trlow.cli.train import show_stall
from trlow.errors import TrlowError, UsageError
from trlow.version import __version__

__all__ = ["main"]

EXIT_RUNTIME = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    arguments = build(__version__).parse_args(argv)
    try:
        code: int = arguments.run(arguments, Console(sys.stdout))
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error, EXIT_USAGE)
    except TrlowError as error:
        code = _fail(error, EXIT_RUNTIME)
        show_stall(error)
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_RUNTIME
    return code


def _fail(problem: object, code: int) -> int:
    print(f"trlow: error: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
