"""Compiled kernels on disk, so that a second process start compiles nothing.

A folder of this user alone, one file per image, named by what the image was made of. Nothing in it
is believed: a folder or file that somebody else could have written, a symbolic link, a wrong key,
length or digest is the same as no file, and is written anew. Nor is it needed: where it cannot be
read or written, everything is compiled. A file is written beside its place and renamed into it, so
processes and threads may do so at once, and a reader sees an old file, a new one, or none.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

MAGIC = b"trlow1\r\n"
_HEAD = struct.Struct("<8s32sQ32s")  # magic, key, length and digest of the image
_MOST_NBYTES = 64 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO in the place of a file must not block the reader.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def key_of(parts: Sequence[bytes]) -> bytes:
    """The digest of everything an image is made of; no two lists of parts have the same text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class KernelCache:
    """Images by key in ``folder``; with None nothing is kept. Never raises ``OSError``."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def read(self, key: bytes) -> bytes | None:
        """The image under ``key``, or None if there is none that can be believed."""
        with suppress(OSError), self._opened() as folder:
            handle = os.open(key.hex(), _OPEN_FILE, dir_fd=folder)
            with os.fdopen(handle, "rb") as file:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_NBYTES:
                    return None
                _check_private("the file", status)
                return _image_in(file.read(_MOST_NBYTES + 1), key)
        return None

    def write(self, key: bytes, image: bytes) -> None:
        """Keep ``image`` under ``key``, in the place of whatever is there, if that can be done."""
        head = _HEAD.pack(MAGIC, key, len(image), hashlib.sha256(image).digest())
        with suppress(OSError), self._opened() as folder:
            _place(folder, key.hex(), head + image)

    def problem(self) -> str | None:
        """Why nothing can be kept, None if it can. Tries it, so the folder exists afterwards."""
        if self.folder is None:
            return "it is switched off"
        name = f".probe-{token_hex(8)}"
        try:
            with self._opened() as folder:
                _place(folder, name, b"")
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            return str(error)
        return None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, made if it is missing; ``OSError`` if it is not private."""
        if self.folder is None:
            raise FileNotFoundError
        try:
            handle = os.open(self.folder, _OPEN_FOLDER)
        except FileNotFoundError:
            _make(self.folder)
            handle = os.open(self.folder, _OPEN_FOLDER)
        try:
            _check_private(f"the folder {self.folder}", os.fstat(handle))
            yield handle
        finally:
            os.close(handle)


def _make(folder: str) -> None:
    """Make ``folder`` and what is missing above it, all of them for this user alone."""
    path = Path(folder)
    missing = [each for each in (path, *path.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        each.mkdir(0o700, exist_ok=True)  # another process may be faster


def _check_private(what: str, status: os.stat_result) -> None:
    """Raise ``PermissionError`` if anybody but this user could have written it."""
    if status.st_uid != os.geteuid():
        message = f"{what} belongs to user {status.st_uid}, not to {os.geteuid()}"
        raise PermissionError(message)
    if status.st_mode & _OTHERS_WRITE:
        message = f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):03o})"
        raise PermissionError(message)


def _image_in(content: bytes, key: bytes) -> bytes | None:
    """What a whole and unchanged file of ``key`` holds, else None."""
    if len(content) < _HEAD.size:
        return None
    magic, named, length, digest = _HEAD.unpack_from(content)
    image = content[_HEAD.size :]
    if (magic, named, length) != (MAGIC, key, len(image)):
        return None
    return image if hashlib.sha256(image).digest() == digest else None


def _place(folder: int, name: str, content: bytes) -> None:
    """Write a new file and rename it to ``name``; a reader never sees a part of it."""
    fresh = f".{name}-{token_hex(8)}"
    handle = os.open(fresh, _NEW_FILE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # whatever the umask says
            file.write(content)
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh, dir_fd=folder)
        raise
