// The report of what went wrong last, and the names of error codes.
//
// Invariant: ncclGetLastError's text is copied to the calling thread, so it stays valid there
// until that thread asks again.
#include <cstring>

#include "entry.h"

namespace trlow_host {

void set_report(const std::string& text) { state().report = text; }

namespace {

struct CodeName {
    int code;
    const char* name;
    const char* text;
};

#define CODE(name, text) {name, #name, text}
const CodeName kCuda[] = {
    CODE(cudaSuccess, "no error"),
    CODE(cudaErrorInvalidValue, "invalid argument"),
    CODE(cudaErrorMemoryAllocation, "out of memory"),
    CODE(cudaErrorInitializationError, "initialization error: the host device was used before fork"),
    CODE(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    CODE(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    CODE(cudaErrorInvalidMemcpyDirection, "invalid copy direction"),
    CODE(cudaErrorInsufficientDriver, "the driver is older than the runtime"),
    CODE(cudaErrorInvalidDeviceFunction, "invalid device function"),
    CODE(cudaErrorNoDevice, "no device"),
    CODE(cudaErrorInvalidDevice, "invalid device ordinal"),
    CODE(cudaErrorInvalidKernelImage, "invalid kernel image"),
    CODE(cudaErrorDeviceUninitialized, "invalid device context"),
    CODE(cudaErrorInvalidResourceHandle, "invalid resource handle, or one of another device"),
    CODE(cudaErrorIllegalState, "the call does not fit the state of its object"),
    CODE(cudaErrorSymbolNotFound, "named symbol not found"),
    CODE(cudaErrorNotReady, "not ready"),
    CODE(cudaErrorIllegalAddress, "an illegal address was accessed"),
    CODE(cudaErrorLaunchTimeout, "the work made no progress; ncclGetLastError says why"),
    CODE(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    CODE(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    CODE(cudaErrorHostMemoryAlreadyRegistered, "host memory is already registered"),
    CODE(cudaErrorHostMemoryNotRegistered, "host memory is not registered"),
    CODE(cudaErrorLaunchFailure, "a kernel failed; ncclGetLastError says how"),
    CODE(cudaErrorNotPermitted, "operation not permitted"),
    CODE(cudaErrorNotSupported, "operation not supported on the host device"),
    CODE(cudaErrorStreamCaptureUnsupported, "operation not permitted while a stream is capturing"),
    CODE(cudaErrorStreamCaptureInvalidated, "the capture failed because of an earlier error"),
    CODE(cudaErrorStreamCaptureMerge, "the operation would merge two captures"),
    CODE(cudaErrorStreamCaptureUnmatched, "the capture was not begun in this stream"),
    CODE(cudaErrorStreamCaptureUnjoined, "a forked stream was not joined to the capture's origin"),
    CODE(cudaErrorStreamCaptureIsolation, "the capture would depend on work outside of it"),
    CODE(cudaErrorStreamCaptureImplicit, "the capture would depend on the legacy stream"),
    CODE(cudaErrorCapturedEvent, "the event was last recorded in a capturing stream"),
    CODE(cudaErrorStreamCaptureWrongThread, "the capture was begun by another thread"),
    CODE(cudaErrorUnknown, "unknown error"),
};
#undef CODE

const CodeName* find_code(int code) {
    for (const CodeName& each : kCuda) {
        if (each.code == code) return &each;
    }
    return nullptr;
}

// CUDA_ERROR_… where the driver's name is not the runtime's.
const CodeName kDriver[] = {
    {0, "CUDA_SUCCESS", nullptr},
    {1, "CUDA_ERROR_INVALID_VALUE", nullptr},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", nullptr},
    {3, "CUDA_ERROR_NOT_INITIALIZED", nullptr},
    {100, "CUDA_ERROR_NO_DEVICE", nullptr},
    {101, "CUDA_ERROR_INVALID_DEVICE", nullptr},
    {200, "CUDA_ERROR_INVALID_IMAGE", nullptr},
    {201, "CUDA_ERROR_INVALID_CONTEXT", nullptr},
    {400, "CUDA_ERROR_INVALID_HANDLE", nullptr},
    {401, "CUDA_ERROR_ILLEGAL_STATE", nullptr},
    {500, "CUDA_ERROR_NOT_FOUND", nullptr},
    {600, "CUDA_ERROR_NOT_READY", nullptr},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", nullptr},
    {719, "CUDA_ERROR_LAUNCH_FAILED", nullptr},
    {801, "CUDA_ERROR_NOT_SUPPORTED", nullptr},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", nullptr},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", nullptr},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", nullptr},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", nullptr},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", nullptr},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", nullptr},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", nullptr},
    {907, "CUDA_ERROR_CAPTURED_EVENT", nullptr},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", nullptr},
    {999, "CUDA_ERROR_UNKNOWN", nullptr},
};

}  // namespace

}  // namespace trlow_host

using namespace trlow_host;

extern "C" const char* cudaGetErrorName(cudaError_t error) {
    const CodeName* found = find_code(static_cast<int>(error));
    return found == nullptr ? "unrecognized error code" : found->name;
}

extern "C" const char* cudaGetErrorString(cudaError_t error) {
    const CodeName* found = find_code(static_cast<int>(error));
    return found == nullptr ? "unrecognized error code" : found->text;
}

extern "C" CUresult cuGetErrorName(CUresult error, const char** text) {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *text = nullptr;
    for (const CodeName& each : kDriver) {
        if (each.code == static_cast<int>(error)) *text = each.name;
    }
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

extern "C" CUresult cuGetErrorString(CUresult error, const char** text) {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CodeName* found = find_code(static_cast<int>(error));
    *text = found == nullptr ? nullptr : found->text;
    return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

extern "C" const char* ncclGetErrorString(ncclResult_t result) {
    switch (static_cast<int>(result)) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "system error, or a fork after first use";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "a peer is missing";
        case ncclInProgress: return "in progress";
        case ncclTimeout: return "timeout";
        default: return "unknown result code";
    }
}

extern "C" const char* ncclGetLastError(ncclComm_t) {
    if (forked) return "the host device was used before fork(); it does not work in the child";
    static thread_local char text[4096];
    State& s = state();
    const Lock lock(s.mutex);
    std::strncpy(text, s.report.c_str(), sizeof text - 1);
    return text;
}
