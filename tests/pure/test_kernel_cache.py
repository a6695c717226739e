"""The cache of compiled kernels believes nothing that somebody else could have written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow import kernel_cache
from trlow.kernel_cache import KernelCache, key_of

KEY, OTHER = key_of([b"source"]), key_of([b"another"])
IMAGE = b"\x7fELF" + bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "trlow" / "kernels"


@pytest.fixture
def cache(folder):
    return KernelCache(str(folder))


@pytest.fixture
def entry(cache, folder):
    cache.write(KEY, IMAGE)
    return folder / KEY.hex()


def test_what_is_written_is_read_under_its_key_alone(cache):
    assert cache.read(KEY) is None
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) == IMAGE
    assert cache.read(OTHER) is None
    assert KernelCache(cache.folder).read(KEY) == IMAGE


def test_folders_and_files_are_this_users_alone_whatever_the_umask(cache, folder):
    before = os.umask(0)
    try:
        cache.write(KEY, IMAGE)
    finally:
        os.umask(before)
    made = (folder.parent.parent, folder.parent, folder)
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def truncated(content):
    return content[:-1]


def extended(content):
    return content + b"\0"


def empty(_content):
    return b""


def headless(content):
    return content[:20]


def poisoned(content):
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def of_another_version(content):
    return b"trlow0\r\n" + content[8:]


def with_another_digest(content):
    return content[:48] + bytes(32) + content[80:]


def of_another_key(content):
    return content[:8] + OTHER + content[40:]


DAMAGES = (
    *(truncated, extended, empty, headless, poisoned),
    *(of_another_version, with_another_digest, of_another_key),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_a_damaged_file_is_no_file_and_is_written_anew(cache, entry, damage):
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.read(KEY) is None
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) == IMAGE


@given(st.data())
def test_no_flipped_bit_goes_unseen(tmp_path_factory, data):
    cache = KernelCache(str(tmp_path_factory.mktemp("flip", numbered=True)))
    cache.write(KEY, IMAGE[:64])
    path = Path(cache.folder) / KEY.hex()
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert cache.read(KEY) is None


def test_a_file_that_was_renamed_is_foreign(cache, entry):
    entry.rename(entry.with_name(OTHER.hex()))
    assert cache.read(OTHER) is None


def test_a_symbolic_link_is_not_followed_and_is_replaced(cache, entry, tmp_path):
    target = tmp_path / "elsewhere"
    entry.rename(target)
    entry.symlink_to(target)
    assert cache.read(KEY) is None
    cache.write(KEY, IMAGE[::-1])
    assert not entry.is_symlink()
    assert cache.read(KEY) == IMAGE[::-1]
    assert target.read_bytes().endswith(IMAGE)  # what it pointed to was not written through


def test_a_folder_that_is_a_symbolic_link_is_not_used(cache, entry, folder, tmp_path):
    real = tmp_path / "real"
    folder.rename(real)
    folder.symlink_to(real)
    before = sorted(real.iterdir())
    assert cache.read(KEY) is None
    cache.write(OTHER, IMAGE)
    assert sorted(real.iterdir()) == before
    assert "link" in cache.problem() or "directory" in cache.problem()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_is_not_used(cache, entry, folder, mode):
    folder.chmod(mode)
    assert cache.read(KEY) is None
    cache.write(OTHER, IMAGE)
    assert not (folder / OTHER.hex()).exists()
    assert "can be written by others" in cache.problem()
    folder.chmod(0o755)  # readable is no danger
    assert cache.read(KEY) == IMAGE


def test_a_file_that_others_can_write_is_written_anew(cache, entry):
    entry.chmod(0o666)
    assert cache.read(KEY) is None
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) == IMAGE
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_what_belongs_to_somebody_else_is_not_used(cache, entry, monkeypatch):
    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: os.getuid() + 1)
    assert cache.read(KEY) is None
    assert f"belongs to user {os.getuid()}" in cache.problem()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_neither_blocks_nor_raises(cache, folder, make):
    folder.mkdir(0o700, parents=True)
    make(folder / KEY.hex())
    assert cache.read(KEY) is None
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) == (None if make is os.mkdir else IMAGE)
    assert [path.name for path in folder.iterdir()] == [KEY.hex()]  # nothing left half-way


def test_without_a_folder_nothing_is_kept_and_nothing_raises():
    cache = KernelCache(None)
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) is None
    assert cache.problem() == "it is switched off"


@pytest.mark.parametrize("place", ["/proc/trlow/kernels", "/dev/null/kernels"])
def test_without_a_writable_place_nothing_is_kept_and_nothing_raises(place):
    cache = KernelCache(place)
    cache.write(KEY, IMAGE)
    assert cache.read(KEY) is None
    assert place.split("/")[1] in cache.problem()


def test_a_usable_folder_has_no_problem_and_is_left_empty(cache, folder):
    assert cache.problem() is None
    assert list(folder.iterdir()) == []


@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
def test_other_parts_have_another_key(one, other):
    assert (key_of(one) == key_of(other)) == (one == other)


def test_fourteen_files_are_read_within_ten_milliseconds(cache):
    keys = [key_of([bytes([index])]) for index in range(14)]
    for key in keys:
        cache.write(key, os.urandom(40_000))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert all(cache.read(key) for key in keys)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.010  # the fastest: the test shares its cores with others


HAMMER = """
import sys
from trlow.kernel_cache import KernelCache, key_of
cache = KernelCache(sys.argv[1])
for turn in range(150):
    for number in range(3):
        key = key_of([bytes([number])])
        found = cache.read(key)
        assert found in (None, bytes([number]) * 30_000), "torn"
        cache.write(key, bytes([number]) * 30_000)
"""


@pytest.mark.timeout(60)
def test_processes_and_threads_at_once_see_whole_images_only(folder):
    script = [sys.executable, "-c", HAMMER, str(folder)]
    processes = [subprocess.Popen(script, stderr=subprocess.PIPE) for _ in range(3)]
    cache, failures = KernelCache(str(folder)), []

    def hammer(number):
        key, image = key_of([bytes([number])]), bytes([number]) * 30_000
        for _ in range(150):
            if cache.read(key) not in {None, image}:
                failures.append(number)
            cache.write(key, image)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.communicate(timeout=50)[1] for process in processes] == [b""] * 3
    assert failures == []
    assert len(list(folder.iterdir())) == 3
