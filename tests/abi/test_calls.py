"""Lists of C calls: what arrives, where they stop, and that no interpreter's lock is held."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from ctypes import byref
from enum import IntEnum

import pytest

from trlow.binding import clib
from trlow.binding import host as host_binding
from trlow.binding.calls import WORDS, CallList
from trlow.binding.clib import Interface, open_library
from trlow.binding.prototype import read_prototypes, read_types
from trlow.errors import CudaError, LibraryError

TYPES = """
typedef int status_t;
typedef struct thing* handle_t;
typedef struct { char bytes[8]; } Small;
"""
PROTOTYPES = """
status_t keep(int a, unsigned int b, long long c, unsigned long long d, size_t e, const void* f,
    const char* g, int* h, handle_t i, int j, void* k, size_t l);
status_t answer(int code);
status_t ask(int code);
status_t meet(int others);
int plain(int a);
status_t floating(float a);
status_t structure(Small a);
status_t many(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
    int m);
#if VERSION >= 2
status_t newer(void);
#endif
"""
STUB = f"""
#include <stddef.h>
#include <string.h>
#include <time.h>
{TYPES}{PROTOTYPES}
long long kept[12];
char text[16];
int calls = 0;
static int arrived = 0;
status_t keep(int a, unsigned int b, long long c, unsigned long long d, size_t e, const void* f,
    const char* g, int* h, handle_t i, int j, void* k, size_t l) {{
    long long all[12] = {{a, b, c, d, e, (size_t)f, 0, ++*h, (size_t)i, j, (size_t)k, l}};
    memcpy(kept, all, sizeof all);
    strncpy(text, g ? g : "none", sizeof text - 1);
    return 0;
}}
status_t answer(int code) {{ ++calls; return code; }}
status_t ask(int code) {{ ++calls; return code; }}
int plain(int a) {{ return a; }}
status_t floating(float a) {{ return (int)a; }}
status_t structure(Small a) {{ return a.bytes[0]; }}
status_t many(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
    int m) {{ return a + b + c + d + e + f + g + h + i + j + k + l + m; }}
/* Returns once that many threads are inside at the same time; 6 after ten seconds. */
status_t meet(int others) {{
    __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 10000; ++i) {{
        if (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) >= others) return 0;
        struct timespec pause = {{0, 1000000}};
        nanosleep(&pause, NULL);
    }}
    return 6;
}}
"""


class Small(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 8),)


class Word(IntEnum):
    SEVEN = 7


@pytest.fixture(scope="module")
def stub(build_stub):
    interface = Interface(
        title="stub",
        short="stub",
        prototypes=read_prototypes(PROTOTYPES, read_types(TYPES, {"Small": Small})),
        status="status_t",
        failure=lambda _library, name, code: CudaError(name, code, "said so"),
        tolerated={"ask": {3}},
    )
    return open_library(interface, str(build_stub(f"#define VERSION 1\n{STUB}")), "test")


@pytest.fixture(scope="module")
def host():
    return host_binding.load_extensions()


def calls_of(stub):
    return ctypes.c_int.in_dll(stub._cdll, "calls").value


def test_every_kind_of_argument_arrives_as_it_does_through_ctypes(stub, host):
    counter, raw = ctypes.c_int(40), (ctypes.c_char * 4)(b"a", b"b")
    values = (-5, 2**32 - 1, -(2**63), 2**64 - 1, ctypes.c_size_t(2**63 + 1), raw, b"words")
    values += (byref(counter), 2**64 - 2, Word.SEVEN, ctypes.c_void_p(2**63 + 9), 1 << 40)
    found = []
    for make in (stub.keep, lambda *given: CallList(host, [stub.prepare("keep", *given)])()):
        make(*values)
        found.append(list((ctypes.c_longlong * 12).in_dll(stub._cdll, "kept")))
        assert (ctypes.c_char * 16).in_dll(stub._cdll, "text").value == b"words"
    assert found[0][:4] == [-5, 2**32 - 1, -(2**63), -1]
    assert found[0][9] == 7
    assert found[1].pop(7) == found[0].pop(7) + 1 == 42
    assert found[0] == found[1]


def test_nothing_is_null(stub, host):
    CallList(
        host, [stub.prepare("keep", 0, 0, 0, 0, 0, None, None, byref(ctypes.c_int()), *[0] * 4)]
    )()
    assert (ctypes.c_char * 16).in_dll(stub._cdll, "text").value == b"none"
    assert list((ctypes.c_longlong * 12).in_dll(stub._cdll, "kept")) == [0] * 7 + [1] + [0] * 4


def test_what_a_call_points_to_lives_as_long_as_its_list(stub, host):
    class Kept(ctypes.c_int):
        pass

    def made():
        argument, counter = (ctypes.c_char * 9)(*[b"x"] * 8), Kept()
        alive.extend(map(weakref.ref, (argument, counter)))
        values = *[0] * 5, None, argument, byref(counter), *[0] * 4
        return CallList(host, [stub.prepare("keep", *values)])

    alive = []
    calls = made()
    gc.collect()
    assert all(one() is not None for one in alive)
    calls()
    assert (ctypes.c_char * 16).in_dll(stub._cdll, "text").value == b"x" * 8
    del calls
    gc.collect()
    assert all(one() is None for one in alive)


def test_a_list_stops_at_the_first_failure_and_can_be_made_again(stub, host):
    calls = CallList(host, [stub.prepare("answer", code) for code in (0, 0, 4, 0, 5)])
    assert len(calls) == 5
    for _ in range(2):
        before = calls_of(stub)
        with pytest.raises(CudaError, match="answer failed: said so") as raised:
            calls()
        assert raised.value.code == 4
        assert calls_of(stub) == before + 3


@pytest.mark.parametrize("codes", [[], [0], [3], [3, 3], [0, 3, 0], [3, 0, 0, 3]])
def test_a_code_that_is_an_answer_stops_nothing(stub, host, codes):
    before = calls_of(stub)
    CallList(host, [stub.prepare("ask", code) for code in codes])()
    assert calls_of(stub) == before + len(codes)


def test_an_answer_of_one_function_is_a_failure_of_another(stub, host):
    before = calls_of(stub)
    with pytest.raises(CudaError, match="answer failed"):
        CallList(
            host, [stub.prepare("ask", 3), stub.prepare("answer", 3), stub.prepare("ask", 0)]
        )()
    assert calls_of(stub) == before + 2


def test_every_call_that_returned_is_counted_in_every_counter(stub, host):
    codes = [("ask", 3), ("answer", 0), ("answer", 0), ("ask", 0), ("answer", 1), ("ask", 0)]
    calls = CallList(host, [stub.prepare(name, code) for name, code in codes])
    with clib.counting() as outer, clib.counting() as inner, pytest.raises(CudaError):
        calls()
    me = threading.get_ident()
    assert outer == inner
    assert {key: outer[key] for key in outer if key[1] != "trlowHostRun"} == {
        (me, "ask"): 2,
        (me, "answer"): 3,
    }


def test_two_threads_are_inside_at_the_same_time(stub, host):
    found = []

    def run():
        CallList(host, [stub.prepare("answer", 0), stub.prepare("meet", 2)])()
        found.append(True)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [True, True]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plain", (1,)),
        ("floating", (1.0,)),
        ("floating", (1,)),
        ("structure", (Small(),)),
        ("many", range(WORDS + 1)),
        ("answer", ()),
        ("answer", (1, 2)),
        ("answer", ("a",)),
        ("answer", (1.5,)),
        ("answer", (None,)),
        ("keep", (*[0] * 7, 5, *[0] * 4)),
    ],
)
def test_what_cannot_be_in_a_list_is_refused(stub, host, name, arguments):
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        CallList(host, [stub.prepare(name, *arguments)])


def test_what_the_library_lacks_cannot_be_in_a_list(stub):
    with pytest.raises(AttributeError):
        stub.prepare("nothing")
    with pytest.raises(LibraryError):
        stub.prepare("newer")


def test_a_missing_loop_is_named():
    with pytest.raises(LibraryError, match="/nowhere/lib"):
        host_binding.load_extensions("/nowhere/libtrlow_host.so")
