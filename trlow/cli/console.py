"""What a person sees: lines and tables, with rich on a terminal and as plain text elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TextIO

ERASE_LINE = "\x1b[K"  # from the cursor to the end of the line (ECMA-48)


class Console:
    """Writes to one text stream. Rich is used when it is installed and the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Look at the stream; load nothing."""
        self._stream = stream
        self._terminal = stream.isatty()
        self._clear = ""  # what takes a status off the terminal
        self._rich = self._terminal and importlib.util.find_spec("rich") is not None

    def line(self, text: str = "") -> None:
        """Write one line, which shows at once; on a terminal in place of a status."""
        print(f"{self._clear}{text}", file=self._stream, flush=True)
        self._clear = ""

    def status(self, text: str) -> None:
        """Show one line that the next replaces; only on a terminal."""
        if self._terminal:
            print(f"\r{text}{ERASE_LINE}", end="", file=self._stream, flush=True)
            self._clear = f"\r{ERASE_LINE}"

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], right: str = ""
    ) -> None:
        """Write a table; `right` has an "r" at the place of each column that holds numbers."""
        cells = [[str(cell) for cell in row] for row in rows]
        flags = right.ljust(len(columns))
        if self._rich:
            self._rich_table(title, columns, cells, flags)
        else:
            self._plain_table(title, columns, cells, flags)
        self._stream.flush()

    def _plain_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], flags: str
    ) -> None:
        widths = [max(len(text) for text in column) for column in zip(columns, *rows, strict=True)]
        print(title, file=self._stream)
        for row in (columns, *rows):
            fields = [
                text.rjust(width) if flag == "r" else text.ljust(width)
                for text, width, flag in zip(row, widths, flags, strict=True)
            ]
            print("  " + "  ".join(fields).rstrip(), file=self._stream)

    def _rich_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], flags: str
    ) -> None:
        # Loaded here: rich is optional, and of no use where the output is not a terminal.
        from rich.box import SIMPLE_HEAD  # noqa: PLC0415
        from rich.console import Console as RichConsole  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for name, flag in zip(columns, flags, strict=True):
            table.add_column(name, justify="right" if flag == "r" else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        RichConsole(file=self._stream, highlight=False, markup=False).print(table)
