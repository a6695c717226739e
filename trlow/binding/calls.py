"""Lists of C calls that are made in C, one after another, without the interpreter in between.

A thread that calls C through ctypes gives the interpreter's lock away at each call and takes it
back, and sleeps where another thread has it. A list gives it away once. The loop is
`native/host/calls.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from trlow.binding import clib
from trlow.binding.clib import Library, Prepared

__all__ = ["WORDS", "CallList", "Entry"]

WORDS = 12  # arguments that a call can have; cuLaunchKernel has 11
_MASK = (1 << 64) - 1
_INTEGERS = {ctypes.c_int, ctypes.c_uint, ctypes.c_longlong, ctypes.c_ulonglong, ctypes.c_size_t}


class Entry(ctypes.Structure):
    """trlowHostCall: the address of a function and its arguments."""

    _fields_ = (("function", ctypes.c_void_p), ("words", ctypes.c_uint64 * WORDS))


class CallList:
    """Calls that are made in order, up to the first that fails."""

    def __init__(self, host: Library, calls: Sequence[Prepared]) -> None:
        """`host` has the loop: the table of the host device's extensions (binding.host).

        TypeError for a function that cannot be in a list: one whose result is no error code, that
        takes more than `WORDS` arguments, or a structure or a floating-point number by value.
        """
        self._run = host.trlowHostRun
        self._calls = tuple(calls)
        self._entries = (Entry * len(self._calls))(*map(_entry, self._calls))

    def __len__(self) -> int:
        """How many."""
        return len(self._calls)

    def __call__(self) -> None:
        """Make them. Raises what the first that fails would raise, called by itself."""
        total, done, code = len(self._calls), 0, ctypes.c_int()
        while done < total:
            first = ctypes.byref(self._entries[done])
            made = done + self._run(first, total - done, ctypes.byref(code))
            if clib.is_counting():
                clib.count([one.name for one in self._calls[done : made + 1]])
            if made < total:
                last = self._calls[made]
                last.library.judge(last.name, code.value)
            done = made + 1


def _entry(call: Prepared) -> Entry:
    name, prototype = call.name, call.library.prototype(call.name)
    if prototype.result != call.library.interface.status:
        raise TypeError(f"{name} returns {prototype.result}, which says nothing of failures")
    if len(call.given) > WORDS:
        raise TypeError(f"{name} takes {len(call.given)} arguments, a list passes {WORDS}")
    pairs = zip(prototype.argtypes, call.given, strict=True)
    return Entry(call.library.address(name), tuple(_word(name, *pair) for pair in pairs))


def _word(name: str, argtype: Any, argument: Any) -> int:
    """What lies in the register or the place on the stack of one argument."""
    if issubclass(argtype, (ctypes.Structure, ctypes.c_float)):
        raise TypeError(f"{name} takes a {argtype.__name__} by value, which no word can be")
    if argtype in _INTEGERS:
        return int(argtype(getattr(argument, "value", argument)).value) & _MASK
    if isinstance(argument, int):  # a handle or an address
        return argument & _MASK
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
