// CUDA runtime: versions, the current device, attributes, peers, the last error; and the host
// device's own configuration.
//
// Invariant: the current device belongs to the thread, and new threads start on device 0.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "entry.h"

using namespace trlow_host;

static constexpr int kVersion = 13000;

static bool valid(int device) { return device >= 0 && device < state().device_count; }

TRLOW_ENTRY(cudaRuntimeGetVersion);
extern "C" cudaError_t cudaRuntimeGetVersion(int* version) {
    TRLOW_CUDA(cudaRuntimeGetVersion);
    if (version == nullptr) return cuda_result(kInvalidValue);
    *version = kVersion;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDriverGetVersion);
extern "C" cudaError_t cudaDriverGetVersion(int* version) {
    TRLOW_CUDA(cudaDriverGetVersion);
    if (version == nullptr) return cuda_result(kInvalidValue);
    *version = kVersion;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetLastError(void) {
    const int code = forked ? kInitializationError : self().last_error;
    self().last_error = 0;
    return static_cast<cudaError_t>(code);
}

extern "C" cudaError_t cudaPeekAtLastError(void) {
    return static_cast<cudaError_t>(forked ? kInitializationError : self().last_error);
}

TRLOW_ENTRY(cudaGetDeviceCount);
extern "C" cudaError_t cudaGetDeviceCount(int* count) {
    TRLOW_CUDA(cudaGetDeviceCount);
    if (count == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    *count = state().device_count;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaSetDevice);
extern "C" cudaError_t cudaSetDevice(int device) {
    TRLOW_CUDA(cudaSetDevice);
    const Lock lock(state().mutex);
    if (!valid(device)) return cuda_result(kInvalidDevice);
    self().device = device;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGetDevice);
extern "C" cudaError_t cudaGetDevice(int* device) {
    TRLOW_CUDA(cudaGetDevice);
    if (device == nullptr) return cuda_result(kInvalidValue);
    *device = self().device;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDeviceGetAttribute);
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute,
                                              int device) {
    TRLOW_CUDA(cudaDeviceGetAttribute);
    if (value == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!valid(device)) return cuda_result(kInvalidDevice);
    switch (static_cast<int>(attribute)) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxBlockDimX: *value = 1024; break;
        case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount:
            *value = static_cast<int>(std::thread::hardware_concurrency());
            break;
        case cudaDevAttrIntegrated: *value = 1; break;
        case cudaDevAttrPciBusId: *value = device + 1; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1024; break;
        case cudaDevAttrAsyncEngineCount: *value = 1; break;
        case cudaDevAttrUnifiedAddressing: *value = 1; break;
        case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 48 << 10; break;
        default:
            if (static_cast<int>(attribute) < 1) return cuda_result(kInvalidValue);
            *value = 0;
    }
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDeviceSynchronize);
extern "C" cudaError_t cudaDeviceSynchronize(void) {
    TRLOW_CUDA(cudaDeviceSynchronize);
    Lock lock(state().mutex);
    const int code = forbid_disturbing(self().device);
    if (code != 0) return cuda_result(code);
    return cuda_result(wait_device(lock, self().device));
}

TRLOW_ENTRY(cudaDeviceCanAccessPeer);
extern "C" cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    TRLOW_CUDA(cudaDeviceCanAccessPeer);
    if (can == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!valid(device) || !valid(peer)) return cuda_result(kInvalidDevice);
    *can = device != peer ? 1 : 0;
    return cudaSuccess;
}

static std::set<std::pair<int, int>>& peers() {
    static auto* const made = new std::set<std::pair<int, int>>;
    return *made;
}

TRLOW_ENTRY(cudaDeviceEnablePeerAccess);
extern "C" cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    TRLOW_CUDA(cudaDeviceEnablePeerAccess);
    const Lock lock(state().mutex);
    if (!valid(peer) || peer == self().device) return cuda_result(kInvalidDevice);
    if (flags != 0) return cuda_result(kInvalidValue);
    const bool added = peers().insert({self().device, peer}).second;
    return cuda_result(added ? 0 : static_cast<int>(cudaErrorPeerAccessAlreadyEnabled));
}

TRLOW_ENTRY(cudaDeviceDisablePeerAccess);
extern "C" cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    TRLOW_CUDA(cudaDeviceDisablePeerAccess);
    const Lock lock(state().mutex);
    const bool removed = peers().erase({self().device, peer}) > 0;
    return cuda_result(removed ? 0 : static_cast<int>(cudaErrorPeerAccessNotEnabled));
}

TRLOW_ENTRY(cudaDeviceGetP2PAttribute);
extern "C" cudaError_t cudaDeviceGetP2PAttribute(int* value, enum cudaDeviceP2PAttr attribute,
                                                 int from, int to) {
    TRLOW_CUDA(cudaDeviceGetP2PAttribute);
    if (value == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!valid(from) || !valid(to) || from == to) return cuda_result(kInvalidDevice);
    *value = static_cast<int>(attribute) == cudaDevP2PAttrPerformanceRank ? 0 : 1;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDeviceGetPCIBusId);
extern "C" cudaError_t cudaDeviceGetPCIBusId(char* text, int nbytes, int device) {
    TRLOW_CUDA(cudaDeviceGetPCIBusId);
    const Lock lock(state().mutex);
    if (!valid(device)) return cuda_result(kInvalidDevice);
    if (text == nullptr || nbytes < 13) return cuda_result(kInvalidValue);
    std::snprintf(text, static_cast<std::size_t>(nbytes), "ffff:%02x:00.0", (device + 1) & 0xff);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDeviceGetByPCIBusId);
extern "C" cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
    TRLOW_CUDA(cudaDeviceGetByPCIBusId);
    if (device == nullptr || text == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    unsigned bus = 0;
    if (std::sscanf(text, "ffff:%x:00.0", &bus) != 1) return cuda_result(kInvalidValue);
    if (!valid(static_cast<int>(bus) - 1)) return cuda_result(kInvalidDevice);
    *device = static_cast<int>(bus) - 1;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaDeviceGetStreamPriorityRange);
extern "C" cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    TRLOW_CUDA(cudaDeviceGetStreamPriorityRange);
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
}
