"""`python -m trlow`."""

from __future__ import annotations

import sys

from trlow.cli import main

if __name__ == "__main__":
    sys.exit(main())
