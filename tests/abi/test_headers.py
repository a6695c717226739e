"""The tables against NVIDIA's headers, judged by the C++ compiler."""

from __future__ import annotations

import ctypes
import re

import pytest

from trlow.binding import cudart, driver, host, nccl, nccl_header, nvrtc
from trlow.binding.prototype import read_enum

CUDA_ENUMS = [
    "cudaError",
    "cudaMemcpyKind",
    "cudaStreamCaptureMode",
    "cudaStreamCaptureStatus",
    "cudaGraphNodeType",
    "cudaDeviceAttr",
    "cudaDeviceP2PAttr",
    "cudaMemoryType",
]
DRIVER_ENUMS = ["CUresult", "CUfunction_attribute", "CUdevice_attribute", "CUmoduleLoadingMode"]
NCCL_ENUMS = ["ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclScalarResidence_t"]
NEWER_THAN_ITS_ENUM = {
    "ncclFloat8e4m3": 22400,
    "ncclFloat8e5m2": 22400,
    "ncclNumTypes": 22400,
    "ncclTimeout": 23000,
    "ncclNumResults": 23000,
}
CUDA_INCLUDES = "#include <cuda.h>\n#include <cuda_runtime_api.h>\n"
NCCL_INCLUDES = "#include <nccl.h>\n"
PRELUDE = """
#include <cstddef>
#include <string_view>
#include <type_traits>
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
"""


def signature_asserts(table, version) -> str:
    return "\n".join(
        f"static_assert(std::is_same_v<decltype(&{p.name}), "
        f'{p.result} (*)({", ".join(p.parameters)})>, "{p.name}");'
        for p in table.values()
        if p.since <= version
    )


def symbol_asserts(table, version) -> str:
    """The preprocessor must turn the table's name, and the name without _vN, into the symbol."""
    lines = []
    for name, prototype in table.items():
        if prototype.since <= version:
            for spelled in {name, re.sub(r"_v\d+$", "", name)}:
                lines.append(f'static_assert(std::string_view(TEXT({spelled})) == "{name}");')
    return "\n".join(lines)


def enum_asserts(types, names, version) -> str:
    return "\n".join(
        f'static_assert(static_cast<long long>({key}) == {int(value)}LL, "{key}");'
        for name in names
        for key, value in read_enum(types, name).__members__.items()
        if NEWER_THAN_ITS_ENUM.get(key, 0) <= version
    )


def layout_asserts(c_name, structure, known=None) -> str:
    """sizeof, and offset and size of every field; `known` keeps the fields a header has."""
    fields = [f for f in structure._fields_ if known is None or f[0] in known]
    smaller = type("smaller", (ctypes.Structure,), {"_fields_": fields})
    lines = [f"static_assert(sizeof({c_name}) == {ctypes.sizeof(smaller)});"]
    for name, _ in fields:
        field = getattr(smaller, name)
        lines.append(f"static_assert(offsetof({c_name}, {name}) == {field.offset});")
        lines.append(f"static_assert(sizeof({c_name}::{name}) == {field.size});")
    return "\n".join(lines)


def version_of(includes, header, macro) -> int:
    text = next((i / header).read_text() for i in includes if (i / header).is_file())
    return int(re.search(rf"#define {macro}\s+(\d+)", text)[1])


def test_cuda_prototypes_redeclare_what_the_headers_declare(check_source, cuda_includes):
    both = f'{CUDA_INCLUDES}extern "C" {{\n{cudart.PROTOTYPES}{driver.PROTOTYPES}}}'
    assert check_source(both, cuda_includes) == ""


@pytest.mark.parametrize("module", [cudart, driver])
def test_cuda_function_types_and_symbols_are_those_of_the_headers(
    check_source, cuda_includes, module
):
    table = module.INTERFACE.prototypes
    version = version_of(cuda_includes, "cuda.h", "CUDA_VERSION")
    asserts = signature_asserts(table, version) + "\n" + symbol_asserts(table, version)
    assert len(asserts.splitlines()) > len(table)
    assert check_source(PRELUDE + CUDA_INCLUDES + asserts, cuda_includes) == ""


def test_cuda_codes_and_layouts_are_those_of_the_headers(check_source, cuda_includes):
    version = version_of(cuda_includes, "cuda.h", "CUDA_VERSION")
    pointer = {"type", "device", "devicePointer", "hostPointer"}
    if version >= 13000:
        pointer.add("reserved")
    asserts = [
        enum_asserts(cudart.TYPES, CUDA_ENUMS, version),
        enum_asserts(driver.TYPES, DRIVER_ENUMS, version),
        layout_asserts("cudaPointerAttributes", cudart.PointerAttributes, pointer),
    ]
    for name, value in vars(cudart).items():
        if re.fullmatch(r"cuda[A-Z]\w+", name) and isinstance(value, int):
            asserts.append(f"static_assert({name} == {value});")
    assert check_source(PRELUDE + CUDA_INCLUDES + "\n".join(asserts), cuda_includes) == ""


def test_what_is_asked_of_nvrtc_is_what_its_header_declares(check_source, nvrtc_includes):
    include = "#include <nvrtc.h>\n"
    asserts = [
        signature_asserts(nvrtc.INTERFACE.prototypes, 0),
        enum_asserts(nvrtc.TYPES, ["nvrtcResult"], 0),
    ]
    assert check_source(PRELUDE + include + "\n".join(asserts), nvrtc_includes) == ""
    wrong = signature_asserts(nvrtc.INTERFACE.prototypes, 0).replace("int*", "long*")
    assert "error: " in check_source(PRELUDE + include + wrong, nvrtc_includes)


@pytest.mark.parametrize(
    "wrong",
    [
        "cudaError_t cudaMalloc(void** devPtr, int size);",
        "int cudaMalloc(void** devPtr, size_t size);",
        "CUresult cuDeviceTotalMem_v2(unsigned int* bytes, CUdevice dev);",
    ],
)
def test_a_wrong_prototype_does_not_compile(check_source, cuda_includes, wrong):
    complaint = check_source(f'{CUDA_INCLUDES}extern "C" {{\n{wrong}\n}}', cuda_includes)
    assert "error: " in complaint


def test_a_name_that_a_macro_replaces_is_noticed(check_source, cuda_includes):
    table = {"cuMemAlloc": driver.INTERFACE.prototypes["cuInit"]}
    complaint = check_source(PRELUDE + CUDA_INCLUDES + symbol_asserts(table, 13000), cuda_includes)
    assert "static assertion failed" in complaint


def test_nccl_prototypes_codes_and_layouts_are_those_of_the_header(check_source, nccl_includes):
    version = version_of(nccl_includes, "nccl.h", "NCCL_VERSION_CODE")
    table = nccl.INTERFACE.prototypes
    config = {
        "size",
        "magic",
        "version",
        *(f for f, s in nccl.CONFIG_SINCE.items() if s <= version),
    }
    coll = {"size", "magic", "version"}
    coll |= {f for f, s in nccl.COLL_CONFIG_SINCE.items() if s <= version}
    asserts = [
        f'extern "C" {{\n{nccl.PROTOTYPES}}}',
        signature_asserts(table, version),
        symbol_asserts(table, version),
        enum_asserts(nccl.TYPES, NCCL_ENUMS, version),
        layout_asserts("ncclConfig_t", nccl.Config, config),
        layout_asserts("ncclUniqueId", nccl.UniqueId),
    ]
    if version >= 22200:
        asserts.append(layout_asserts("ncclSimInfo_t", nccl.SimInfo))
    if version >= 22900:
        asserts.append(layout_asserts("ncclWaitSignalDesc_t", nccl.WaitSignalDesc))
    if version >= 22907:
        asserts.append(enum_asserts(nccl.TYPES, ["ncclCommMemStat_t"], version))
    if version >= 23100:
        asserts.append(layout_asserts("ncclCollConfig_t", nccl.CollConfig, coll))
        asserts.append(layout_asserts("ncclConfigExt_t", nccl.ConfigExt))
    for name, value in vars(nccl_header).items():
        if re.match(r"NCCL_[A-Z]", name) and isinstance(value, int):
            missing = f"#if !defined({name}) && NCCL_VERSION_CODE >= 22800\n#error {name}\n#endif"
            equal = f"#ifdef {name}\nstatic_assert({name} == {value});\n#endif"
            asserts += [missing, equal]
    assert check_source(PRELUDE + NCCL_INCLUDES + "\n".join(asserts), nccl_includes) == ""


def test_the_header_declares_no_function_that_the_table_says_is_newer(nccl_includes):
    version = version_of(nccl_includes, "nccl.h", "NCCL_VERSION_CODE")
    text = (nccl_includes[0] / "nccl.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    declared = set(re.findall(r"\b(nccl[A-Z]\w+)\s*\(", code))
    for prototype in nccl.INTERFACE.prototypes.values():
        assert (prototype.name in declared) == (prototype.since <= version), prototype.name


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize(
    "modules", [[cudart], [driver], [nccl], [host], [cudart, driver, nccl, host]]
)
def test_types_and_prototypes_compile_without_any_header(check_source, modules, language):
    types = "".join(module.TYPES for module in modules)
    prototypes = "".join(module.PROTOTYPES for module in modules)
    extern = f'extern "C" {{\n{prototypes}}}\n' if language == "c++" else prototypes
    assert check_source(types + extern, language=language) == ""


def test_own_types_have_the_layout_of_the_python_structures(check_source):
    asserts = [layout_asserts(name, structure) for name, structure in nccl.STRUCTURES.items()]
    asserts.append(layout_asserts("cudaPointerAttributes", cudart.PointerAttributes))
    assert check_source(PRELUDE + cudart.TYPES + nccl.TYPES + "\n".join(asserts)) == ""
    assert ctypes.sizeof(nccl.Config) == 120
    assert ctypes.sizeof(nccl.UniqueId) == 128
