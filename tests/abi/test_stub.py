"""What arrives on the other side: stub libraries compiled from the tables' own C text."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref

import pytest

from trlow.binding import clib, cudart, driver, nccl
from trlow.errors import CudaError, LibraryError, NcclError

NCCL_STUB = f"""
#include <string.h>
#include <time.h>
{nccl.TYPES}{nccl.PROTOTYPES}
#ifndef STUB_VERSION
#define STUB_VERSION 22809
#endif
unsigned char got_id[128];
unsigned long long got[8];
int result = 0;
static int arrived = 0;
ncclResult_t ncclGetVersion(int* version) {{ *version = STUB_VERSION; return ncclSuccess; }}
const char* ncclGetErrorString(ncclResult_t r) {{ return r < 9 ? "words" : NULL; }}
const char* ncclGetLastError(ncclComm_t comm) {{ return comm ? NULL : "rank 3: count differs\\n"; }}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {{
    memcpy(got_id, &id, sizeof id);
    got[0] = nranks; got[1] = rank;
    *comm = (ncclComm_t)0xfedcba9876543210ull;
    return (ncclResult_t)result;
}}
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {{
    got[0] = (size_t)s; got[1] = (size_t)r; got[2] = n; got[3] = t; got[4] = op;
    got[5] = (size_t)comm; got[6] = (size_t)stream;
    return (ncclResult_t)result;
}}
/* Returns once two threads are inside at the same time; 6 after ten seconds. */
ncclResult_t ncclGroupStart(void) {{
    __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 10000; ++i) {{
        if (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) >= 2) return ncclSuccess;
        struct timespec pause = {{0, 1000000}};
        nanosleep(&pause, NULL);
    }}
    return ncclRemoteError;
}}
#if STUB_EXTRA
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {{ return comm ? ncclSuccess : flags; }}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {{
    memcpy(got, config, 32); got[4] = config->commName[0]; got[5] = config->nvlsHostMode;
    return (ncclResult_t)(nranks + rank + (comm == NULL) + id.internal[0]);
}}
#endif
"""
CUDA_STUB = f"""
{cudart.TYPES}{driver.TYPES}{cudart.PROTOTYPES}{driver.PROTOTYPES}
int result = 0;
cudaError_t cudaRuntimeGetVersion(int* version) {{ *version = 12080; return cudaSuccess; }}
CUresult cuDriverGetVersion(int* version) {{ *version = 12020; return CUDA_SUCCESS; }}
const char* cudaGetErrorName(cudaError_t e) {{ return e < 1000 ? "cudaErrorSo" : NULL; }}
const char* cudaGetErrorString(cudaError_t e) {{ return e < 1000 ? "so it is" : NULL; }}
CUresult cuGetErrorName(CUresult e, const char** s) {{
    *s = e < 1000 ? "CUDA_ERROR_SO" : 0;
    return e < 1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}}
CUresult cuGetErrorString(CUresult e, const char** s) {{ return cuGetErrorName(e, s); }}
CUresult cuInit(unsigned int flags) {{ return flags ? (CUresult)flags : CUDA_SUCCESS; }}
cudaError_t cudaEventQuery(cudaEvent_t e) {{ return e ? (cudaError_t)result : cudaSuccess; }}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {{ return (cudaError_t)(s ? result : 0); }}
cudaError_t cudaGetLastError(void) {{ return (cudaError_t)result; }}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {{
    *free = 0xfedcba9876543210ull; *total = ~0ull;
    return cudaSuccess;
}}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {{
    fn(data);
    return s ? cudaErrorInvalidValue : cudaSuccess;
}}
cudaError_t cudaDeviceGetPCIBusId(char* id, int len, int device) {{
    for (int i = 0; i < len - 1; ++i) id[i] = (char)('a' + device);
    id[len - 1] = 0;
    return cudaSuccess;
}}
"""


@pytest.fixture(scope="module")
def stub_nccl(build_stub):
    return nccl.load(build_stub(f"#define STUB_EXTRA 1\n{NCCL_STUB}"))


@pytest.fixture(scope="module")
def stub_path(build_stub):
    return build_stub(CUDA_STUB)


@pytest.fixture(scope="module")
def stub_cudart(stub_path):
    return cudart.load(stub_path)


def seen(library, index):
    return (ctypes.c_ulonglong * 8).in_dll(library._cdll, "got")[index]


@pytest.fixture
def answer():
    """Make a stub's next calls return a code."""
    changed = []

    def set_result(library, code):
        variable = ctypes.c_int.in_dll(library._cdll, "result")
        variable.value = code
        changed.append(variable)

    yield set_result
    for variable in changed:
        variable.value = 0


def test_64_bit_values_arrive_unchanged(stub_nccl):
    values = (0x7FEDCBA987654321, 0xFFFFFFFF00000001, 2**63 + 5, 7, 3, 2**64 - 2, 1 << 40)
    assert stub_nccl.ncclAllReduce(*values) == 0
    assert tuple(seen(stub_nccl, i) for i in range(7)) == values


def test_a_prepared_call_passes_the_same_64_bit_values_every_time(stub_nccl):
    values = (0x7FEDCBA987654321, None, 2**63 + 5, 7, 3, 2**64 - 2, 1 << 40)
    call = stub_nccl.prepare("ncclAllReduce", *values)
    stub_nccl.ncclAllReduce(*range(7))
    for _ in range(2):
        assert call() == 0
        assert tuple(seen(stub_nccl, i) for i in range(7)) == (values[0], 0, *values[2:])
        stub_nccl.ncclAllReduce(*range(7))  # neither call changes what the other converts
        assert tuple(seen(stub_nccl, i) for i in range(7)) == tuple(range(7))


def test_a_prepared_call_takes_what_the_function_takes(stub_nccl, stub_cudart):
    raw = bytes([0, 1, 0, 255] * 32)
    comm = ctypes.c_void_p()
    identity = nccl.UniqueId.from_buffer_copy(raw)
    stub_nccl.prepare("ncclCommInitRank", byref(comm), 8, identity, 5)()
    assert bytes((ctypes.c_ubyte * 128).in_dll(stub_nccl._cdll, "got_id")) == raw
    assert (seen(stub_nccl, 0), seen(stub_nccl, 1)) == (8, 5)
    assert comm.value == 0xFEDCBA9876543210
    got = []
    callback = cudart.cudaHostFn_t(got.append)
    stub_cudart.prepare("cudaLaunchHostFunc", None, callback, 0xFEDCBA9876543210)()
    assert got == [0xFEDCBA9876543210]


def test_a_prepared_call_cannot_skip_the_check_or_the_count(stub_nccl, answer):
    call = stub_nccl.prepare("ncclAllReduce", None, None, 0, 7, 0, None, None)
    with clib.counting() as counted:
        call()
    assert counted == {(threading.get_ident(), "ncclAllReduce"): 1}
    answer(stub_nccl, 5)
    with pytest.raises(NcclError, match="ncclAllReduce failed: ncclInvalidUsage"):
        call()


@pytest.mark.parametrize("arguments", [(1,), (1.5, 2), ("a", "b"), (), (1, 2, 3, 4)])
def test_wrong_arguments_are_refused_where_the_call_is_prepared(stub_cudart, arguments):
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        stub_cudart.prepare("cudaMemGetInfo", *arguments)


def test_a_function_that_the_library_lacks_cannot_be_prepared(stub_cudart, stub_nccl):
    with pytest.raises(AttributeError):
        stub_cudart.prepare("cudaNoSuchThing")
    with pytest.raises(LibraryError):
        stub_nccl.prepare("ncclCommDestroy", None)  # the stub does not export it


def test_a_128_byte_id_full_of_nuls_arrives_unchanged(stub_nccl):
    raw = bytes([0, 1, 0, 255] * 32)
    comm = ctypes.c_void_p()
    stub_nccl.ncclCommInitRank(byref(comm), 8, nccl.UniqueId.from_buffer_copy(raw), 5)
    assert bytes((ctypes.c_ubyte * 128).in_dll(stub_nccl._cdll, "got_id")) == raw
    assert (seen(stub_nccl, 0), seen(stub_nccl, 1)) == (8, 5)
    assert comm.value == 0xFEDCBA9876543210


def test_64_bit_results_come_back_unchanged(stub_cudart):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    stub_cudart.cudaMemGetInfo(byref(free), byref(total))
    assert (free.value, total.value) == (0xFEDCBA9876543210, 2**64 - 1)


def test_a_callback_gets_a_64_bit_address(stub_cudart):
    got = []
    assert stub_cudart.cudaLaunchHostFunc.argtypes[1] is cudart.cudaHostFn_t
    callback = cudart.cudaHostFn_t(got.append)
    stub_cudart.cudaLaunchHostFunc(None, callback, 0xFEDCBA9876543210)
    assert got == [0xFEDCBA9876543210]


def test_an_output_buffer_is_filled_and_a_str_is_refused(stub_cudart):
    buffer = ctypes.create_string_buffer(8)
    stub_cudart.cudaDeviceGetPCIBusId(buffer, 8, 2)
    assert buffer.value == b"ccccccc"
    with pytest.raises(ctypes.ArgumentError):
        stub_cudart.cudaDeviceGetPCIBusId("text", 8, 2)


@pytest.mark.parametrize("arguments", [(1,), (1.5, 2), (), (1, 2, 3, 4)])
def test_wrong_arguments_never_reach_c(stub_cudart, arguments):
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        stub_cudart.cudaMemGetInfo(*arguments)


def test_a_failed_call_raises_with_its_code_and_text(stub_nccl, answer):
    answer(stub_nccl, 5)
    with pytest.raises(NcclError, match="ncclAllReduce failed: ncclInvalidUsage") as caught:
        stub_nccl.ncclAllReduce(None, None, 0, 7, 0, None, None)
    assert (caught.value.function, caught.value.code) == ("ncclAllReduce", 5)
    assert caught.value.detail == "words; last error: rank 3: count differs"


@pytest.mark.parametrize("code", [-1, 4711, 2**31 - 1])
def test_unknown_codes_never_crash(stub_nccl, stub_cudart, stub_path, answer, code):
    answer(stub_nccl, code)
    with pytest.raises(NcclError) as caught:
        stub_nccl.ncclAllReduce(None, None, 0, 7, 0, None, None)
    assert (caught.value.code, caught.value.name) == (code, "unknown result")
    answer(stub_cudart, code)
    with pytest.raises(CudaError) as caught:
        stub_cudart.cudaStreamSynchronize(1)
    assert caught.value.code == code
    if code > 0:
        assert caught.value.name == "unrecognized error code"
        with pytest.raises(CudaError, match=rf"cuInit failed: unrecognized error code \({code}\)"):
            driver.load(stub_path).cuInit(code)


def test_only_a_tolerant_function_returns_not_ready(stub_cudart, answer):
    answer(stub_cudart, 600)
    assert stub_cudart.cudaEventQuery(1) == 600
    assert stub_cudart.cudaGetLastError() == 600
    with pytest.raises(CudaError, match="cudaStreamSynchronize failed: cudaErrorSo"):
        stub_cudart.cudaStreamSynchronize(1)
    answer(stub_cudart, 700)
    with pytest.raises(CudaError):
        stub_cudart.cudaEventQuery(1)


def test_in_progress_is_an_answer_of_calls_on_a_communicator(stub_nccl, answer):
    answer(stub_nccl, 7)
    assert stub_nccl.ncclAllReduce(None, None, 0, 7, 0, None, None) == 7


def test_an_older_version_is_named_with_what_is_needed(build_stub):
    path = build_stub(f"#define STUB_VERSION 22105\n{NCCL_STUB}")
    library = nccl.load(path)
    assert not library.has("ncclCommShrink")
    with pytest.raises(LibraryError) as caught:
        library.ncclCommShrink(None, None, 0, None, None, 0)
    assert str(caught.value) == (f"ncclCommShrink needs NCCL >= 2.27.0, loaded 2.21.5 from {path}")
    assert library.ncclAllReduce(None, None, 0, 7, 0, None, None) == 0
    with pytest.raises(LibraryError, match=r"float8 needs NCCL >= 2\.24\.0, loaded 2\.21\.5"):
        library.require("float8", 22400)
    library.require("bfloat16", 21000)


def test_the_full_version_code_is_compared(build_stub):
    text = f"#define STUB_EXTRA 1\n#define STUB_VERSION %d\n{NCCL_STUB}"
    older = nccl.load(build_stub(text % 22803))
    assert not older.has("ncclCommRevoke"), "2.28.3 with the symbol is refused: it came with 2.28.7"
    with pytest.raises(LibraryError, match=r"needs NCCL >= 2\.28\.7, loaded 2\.28\.3"):
        older.ncclCommRevoke(None, 0)
    newer = nccl.load(build_stub(text % 22807))
    assert newer.ncclCommRevoke(None, 0) == 0


def test_a_symbol_that_the_version_promises_but_the_file_lacks_is_named(stub_nccl):
    assert not stub_nccl.has("ncclCommSplit")
    with pytest.raises(LibraryError, match=r"NCCL 2\.28\.9 from .* has no ncclCommSplit"):
        stub_nccl.ncclCommSplit(None, 0, 0, None, None)


def test_a_version_too_old_to_use_is_refused_at_load(build_stub):
    path = build_stub(f"#define STUB_VERSION 21200\n{NCCL_STUB}")
    with pytest.raises(LibraryError, match=r"trlow needs NCCL >= 2\.14\.0, loaded 2\.12\.0 from"):
        nccl.load(path)


def test_a_name_outside_the_table_is_an_attribute_error(stub_nccl):
    with pytest.raises(AttributeError, match="binds no NCCL function 'ncclAllreduce'"):
        stub_nccl.ncclAllreduce(None)
    with pytest.raises(AttributeError, match="'ncclNoSuch'"):
        stub_nccl.has("ncclNoSuch")
    assert not hasattr(stub_nccl, "__len__")


def test_a_config_reaches_c_with_unset_fields_unset(stub_nccl):
    config = nccl.config(stub_nccl, blocking=1, cgaClusterSize=4, commName="x")
    stub_nccl.ncclCommInitRankConfig(byref(ctypes.c_void_p()), 0, nccl.UniqueId(), 0, byref(config))
    raw = bytes((ctypes.c_ulonglong * 8).in_dll(stub_nccl._cdll, "got"))
    assert int.from_bytes(raw[:8], "little") == 120
    assert raw[8:12] == bytes.fromhex("efbefeca")
    assert [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in (16, 20, 24, 28)] == [
        1,
        4,
        -(2**31),
        -(2**31),
    ]
    assert seen(stub_nccl, 4) == ord("x")
    assert ctypes.c_int(seen(stub_nccl, 5) & 0xFFFFFFFF).value == -(2**31)


def test_calls_are_counted_per_thread_and_only_inside(stub_cudart):
    pair = (byref(ctypes.c_size_t()), byref(ctypes.c_size_t()))
    stub_cudart.cudaMemGetInfo(*pair)
    with clib.counting() as outer:
        stub_cudart.cudaMemGetInfo(*pair)
        with clib.counting() as inner:
            thread = threading.Thread(target=stub_cudart.cudaMemGetInfo, args=pair)
            thread.start()
            thread.join(10)
            stub_cudart.cudaGetErrorName(1)
        stub_cudart.cudaMemGetInfo(*pair)
    stub_cudart.cudaMemGetInfo(*pair)
    here = threading.get_ident()
    assert inner == {(thread.ident, "cudaMemGetInfo"): 1, (here, "cudaGetErrorName"): 1}
    assert outer == {**inner, (here, "cudaMemGetInfo"): 2}


def test_a_failing_call_is_counted_too(stub_cudart, answer):
    answer(stub_cudart, 700)
    with clib.counting() as calls, pytest.raises(CudaError):
        stub_cudart.cudaStreamSynchronize(1)
    assert calls[threading.get_ident(), "cudaStreamSynchronize"] == 1


def test_two_threads_are_inside_c_at_the_same_time(stub_nccl):
    other = threading.Thread(target=stub_nccl.ncclGroupStart, daemon=True)
    other.start()
    assert stub_nccl.ncclGroupStart() == 0
    other.join(20)
    assert not other.is_alive()
