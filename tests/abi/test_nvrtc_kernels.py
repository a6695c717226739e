"""NVRTC compiles every kernel source for every architecture named, on a machine without a GPU."""

from __future__ import annotations

import re
import struct

import pytest

from trlow.kernel import declarations
from trlow.kernel_image import Target, compile_source, source_folder

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python and an NVRTC wheel")

ARCHITECTURES = ("80", "90", "100")
SOURCES = sorted({declaration.source for declaration in declarations().values()})
POINTERS = {
    f"{const}{element}*"
    for const in ("", "const ")
    for element in ("f32", "f64", "u16", "i32", "u8", "i64")
}
PARAMETER_INFO, PARAMETER_BYTES = 0x17, 0x19  # EIATTR_KPARAM_INFO, EIATTR_CBANK_PARAM_SIZE
BY_SIZE = 4  # the attribute's value lies behind it; its 16-bit field is the size


def sections(cubin):
    """The sections of a 64-bit ELF file by name."""
    table, size, count, names = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<3H", cubin, 58),
    )
    headers = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, nbytes in headers:
        start = strings + name
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + nbytes]


def parameters(info):
    """(offset, bytes) of each parameter, and all their bytes, from a section .nv.info.<kernel>."""
    places, total, at = {}, None, 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<2BH", info, at)
        if attribute == PARAMETER_BYTES:
            total = value
        if attribute == PARAMETER_INFO:
            _, ordinal, offset, packed = struct.unpack_from("<I2HI", info, at + 4)
            places[ordinal] = (offset, packed >> 18)
        at += 4 + (value if form == BY_SIZE else 0)
    return [places[ordinal] for ordinal in sorted(places)], total


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_becomes_a_cubin_with_the_kernels_and_parameters_it_declares(source, architecture):
    found = dict(sections(compile_source(source, Target("cubin", int(architecture)))))
    declared = {d.name: d for d in declarations().values() if d.source == source}
    assert {name[6:] for name in found if name.startswith(".text.")} == set(declared)
    for name, declaration in declared.items():
        count = len(declaration.parameters)
        places, total = parameters(found[f".nv.info.{name}"])
        assert places == [(8 * index, 8) for index in range(count)]
        assert total == 8 * count


def test_every_parameter_is_a_pointer_or_a_64_bit_extent():
    for declaration in declarations().values():
        types = [c_type for c_type, _ in declaration.parameters]
        assert set(types) <= POINTERS | {"i64"}, declaration.name
        assert "i64" in types, declaration.name  # 0 there makes a launch do nothing


def test_every_declaration_in_the_sources_is_found():
    for source in SOURCES:
        text = (source_folder() / source).read_text()
        written = re.findall(r"TRLOW_(?:BLOCK_)?KERNEL\((\w+)", text)
        assert sorted(written) == sorted(
            d.name for d in declarations().values() if d.source == source
        )


def test_sources_include_the_portability_header_alone():
    for source in SOURCES:
        text = (source_folder() / source).read_text()
        assert re.findall(r"#include.*", text) == ['#include "trlow_kernel.h"']


@pytest.mark.parametrize("source", SOURCES)
def test_contraction_is_off(source):
    # Otherwise the GPU's bytes differ from the host's. Division and square root stay whole in PTX.
    ptx = compile_source(source, Target("ptx", 80))
    assert b".entry" in ptx
    assert not re.findall(rb"fma\.|\.approx|\.ftz", ptx)
