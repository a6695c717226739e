"""Tables: rich on a terminal where it is installed, plain text elsewhere; files written whole."""

from __future__ import annotations

import importlib.util
import io
import os
import stat

import pytest

from trlow.cli.console import Console
from trlow.cli.output import check_writable, write
from trlow.cli.units import binary
from trlow.errors import SettingsError

TABLE = ("sizes", ("name", "bytes"), [("a", 7), ("long name", 1234)])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_table_lines_up():
    stream = io.StringIO()
    Console(stream).table(*TABLE, right=" r")
    assert stream.getvalue().splitlines() == [
        "sizes",
        "  name       bytes",
        "  a              7",
        "  long name   1234",
    ]


def test_every_line_and_table_is_written_at_once(tmp_path):
    path = tmp_path / "out"
    with path.open("w", encoding="utf-8") as stream:
        console = Console(stream)
        console.line("first")
        assert path.read_text() == "first\n"
        console.table(*TABLE)
        assert "1234" in path.read_text()


def test_a_terminal_gets_rich():
    pytest.importorskip("rich", reason="needs the extra trlow[cli]")
    stream = Terminal()
    Console(stream).table(*TABLE, right=" r")
    assert "───" in stream.getvalue()
    assert "1234" in stream.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    stream = Terminal()
    Console(stream).table(*TABLE)
    assert stream.getvalue().startswith("sizes\n  name")


def test_square_brackets_are_text_on_a_terminal():
    stream = Terminal()
    Console(stream).table("t", ("why",), [("pip install 'trlow[data]'",)])
    assert "trlow[data]" in stream.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3072.00 GiB"),
    ],
)
def test_sizes_as_a_person_reads_them(nbytes, text):
    assert binary(nbytes) == text


def test_a_file_is_replaced_whole_and_readable(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    check_writable("--report", path)
    assert path.read_text() == "old"
    write("--report", path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_failing_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write("--report", path, "\udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_in_place():
    from pathlib import Path

    null = Path("/dev/null")
    check_writable("--report", null)
    write("--report", null, "gone")
    assert null.is_char_device()


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write("--report", link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_link_to_nowhere_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(SettingsError, match="link"):
        check_writable("--report", link)
