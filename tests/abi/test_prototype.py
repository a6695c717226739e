"""Reading C text: what is understood, and that nothing else is bound by a guess."""

from __future__ import annotations

import ctypes
import re

import pytest

from trlow.binding import cudart, driver, host, nccl
from trlow.binding.prototype import read_enum, read_prototypes, read_types
from trlow.errors import UsageError

MODULES = [cudart, driver, nccl, host]


@pytest.mark.parametrize("module", MODULES)
def test_every_prototype_line_becomes_one_function(module):
    text = "\n".join(line for line in module.PROTOTYPES.splitlines() if not line.startswith("#"))
    assert len(module.INTERFACE.prototypes) == text.count(";")
    for name, prototype in module.INTERFACE.prototypes.items():
        assert re.search(rf"\b{name}\(", text)
        assert len(prototype.argtypes) == len(prototype.parameters)


@pytest.mark.parametrize("module", MODULES)
def test_pointers_and_sizes_are_bound_with_64_bits(module):
    for prototype in module.INTERFACE.prototypes.values():
        for declared, bound in zip(prototype.parameters, prototype.argtypes, strict=True):
            wide = "*" in declared or declared in {"size_t", "long long", "unsigned long long"}
            wide |= declared in nccl.STRUCTURES or declared.removeprefix("const ") in {
                *re.findall(r"\* (\w+);", module.TYPES),  # handles
                *re.findall(r"\(\*(\w+)\)", module.TYPES),  # callbacks
                "CUdeviceptr",
            }
            assert (ctypes.sizeof(bound) >= 8) == wide, (prototype.name, declared)


def test_functions_that_differ_between_cuda_12_and_13_are_not_bound():
    different = {
        "cudaGraphGetEdges",
        "cudaGraphNodeGetDependencies",
        "cudaGraphNodeGetDependentNodes",
        "cudaGraphAddDependencies",
        "cudaGraphAddNode",
        "cudaStreamUpdateCaptureDependencies",
        "cudaStreamGetCaptureInfo",
        "cudaGetDeviceProperties",
        "cudaMemPrefetchAsync",
    }
    assert not different & set(cudart.INTERFACE.prototypes)
    assert not any("Multicast" in name for name in driver.INTERFACE.prototypes)


def test_tolerated_names_are_bound_names():
    for module in MODULES:
        assert set(module.INTERFACE.tolerated) <= set(module.INTERFACE.prototypes)


def test_types_map_to_what_ctypes_passes():
    types = read_types(
        "typedef struct x* handle;\nenum e { A = 1 };\ntypedef enum e e_t;\n"
        "typedef enum { B = 2 } f_t;\ntypedef void (*callback)(void* p);\ntypedef int device;\n",
        {},
    )
    table = read_prototypes(
        "const char* f(const void* a, void** b, char* c, const char* d, const char** e,\n"
        "    enum e g, e_t h, f_t* i, const handle j, handle* k, callback l, device m, size_t n);\n"
        "#if V >= 12\nint g(void);\n#endif\nint h(float* x);\n",
        types,
    )
    assert table["f"].restype is ctypes.c_char_p
    assert table["f"].argtypes[:11] == (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_char),
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        types["callback"],
    )
    assert table["f"].argtypes[11:] == (ctypes.c_int, ctypes.c_size_t)
    assert [table[name].since for name in "fgh"] == [0, 12, 0]
    assert table["g"].argtypes == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int f(unknown x);", "'unknown' of .* is not declared"),
        ("int f(int (*x)(void));", "cannot be (bound|read)"),
        ("int f(int x[4]);", "cannot be read"),
        ("int f(int);", "is not declared|cannot be read"),
        ("int f(void)", "does not end"),
        ("#ifdef X\nint f(void);\n#endif", "version guard"),
        ("int f(void);\nint f(void);", "declared twice"),
        ("typedef int x;", "not a C prototype"),
    ],
)
def test_what_is_not_understood_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        read_prototypes(text, read_types("", {}))


def test_an_enum_that_is_not_there_is_refused():
    assert read_enum("typedef enum { A = 0, B = 0x10 } t;", "t").B == 16
    with pytest.raises(UsageError, match="no enum u"):
        read_enum("typedef enum { A = 0 } t;", "u")
