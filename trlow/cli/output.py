"""Files that a command writes: refused before the work begins, and never left half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trlow.errors import SettingsError, TrlowError


def writable(option: str, text: str) -> Path:
    """Return the path that an option names. Raises SettingsError as `check_writable` does."""
    if not text:
        raise SettingsError(f"{option} is empty; give the name of a file")
    path = Path(text)
    check_writable(option, path)
    return path


def check_different(first: tuple[str, Path | None], second: tuple[str, Path | None]) -> None:
    """Raise SettingsError where two options name one file: the second would replace the first."""
    (one, here), (other, there) = first, second
    if here is None or there is None or here.resolve() != there.resolve():
        return
    if here.is_file() or not here.exists():
        raise SettingsError(f"{one} and {other} both name {here}; give each a file of its own")


def check_writable(option: str, path: Path) -> None:
    """Raise SettingsError unless `write` will be able to write `path`. Leaves nothing behind."""
    try:
        if path.is_dir():
            raise SettingsError(f"{option} {path} is a folder; give the name of a file in it")
        if path.exists() and not path.is_file():
            with path.open("ab"):  # a pipe or a device: opened in place, never replaced
                return
        if path.exists():
            with path.open("ab"):
                pass
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(
            f"{option} {path} cannot be written: {reason}; give a file in a folder that exists "
            "and can be written"
        ) from error


def write(option: str, path: Path, text: str) -> None:
    """Write `text` whole or not at all: a reader never sees half a file. A link stays a link.

    Raises TrlowError, naming the option, where the system refuses.
    """
    try:
        _write(path.resolve(), text)
    except OSError as error:
        raise TrlowError(f"{option} {path}: {error.strerror or error}") from error


def _write(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            # mkstemp gives 0600; a report is an ordinary file.
            mask = os.umask(0)
            os.umask(mask)
            Path(file.name).chmod(0o666 & ~mask)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
