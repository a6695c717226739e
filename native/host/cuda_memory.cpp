// CUDA runtime: allocation, copies and sets.
//
// Invariant: an operation that names device memory is checked against the living allocations when
// it is issued; memory that belongs to none is taken for ordinary host memory.
#include "entry.h"

using namespace trlow_host;

static int allocate_here(bool pinned, std::size_t nbytes, void** pointer) {
    {
        const Lock lock(state().mutex);
        const int code = forbid_unsafe();
        if (code != 0) return code;
    }
    return allocate(self().device, pinned, nbytes, pointer);
}

static int release_here(void* pointer, bool pinned) {
    Lock lock(state().mutex);
    const int code = forbid_unsafe();
    return code != 0 ? code : release(lock, pointer, pinned);
}

TRLOW_ENTRY(cudaMalloc);
extern "C" cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
    TRLOW_CUDA(cudaMalloc);
    if (pointer == nullptr) return cuda_result(kInvalidValue);
    return cuda_result(allocate_here(false, nbytes, pointer));
}

TRLOW_ENTRY(cudaFree);
extern "C" cudaError_t cudaFree(void* pointer) {
    TRLOW_CUDA(cudaFree);
    return cuda_result(release_here(pointer, false));
}

TRLOW_ENTRY(cudaHostAlloc);
extern "C" cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned int flags) {
    TRLOW_CUDA(cudaHostAlloc);
    if (pointer == nullptr || flags > 7) return cuda_result(kInvalidValue);
    return cuda_result(allocate_here(true, nbytes, pointer));
}

TRLOW_ENTRY(cudaFreeHost);
extern "C" cudaError_t cudaFreeHost(void* pointer) {
    TRLOW_CUDA(cudaFreeHost);
    return cuda_result(release_here(pointer, true));
}

TRLOW_ENTRY(cudaMemGetInfo);
extern "C" cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    TRLOW_CUDA(cudaMemGetInfo);
    if (free == nullptr || total == nullptr) return cuda_result(kInvalidValue);
    State& s = state();
    const Lock lock(s.mutex);
    const std::size_t used = s.devices[static_cast<std::size_t>(self().device)].used;
    *total = s.device_nbytes;
    *free = used > s.device_nbytes ? 0 : s.device_nbytes - used;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaPointerGetAttributes);
extern "C" cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes,
                                                const void* pointer) {
    TRLOW_CUDA(cudaPointerGetAttributes);
    if (attributes == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    const Allocation* found = find_memory(pointer, 1);
    *attributes = {};
    attributes->device = found == nullptr ? -2 : found->device;
    if (found == nullptr) return cudaSuccess;
    attributes->type = found->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = found->pinned ? const_cast<void*>(pointer) : nullptr;
    return cudaSuccess;
}

// Whether [address, address + nbytes) is device memory, pinned memory, or ordinary memory, where
// the direction of the copy allows it. An allocation that is too short is an error.
static int check_range(const void* address, std::size_t nbytes, bool device) {
    const Allocation* all = find_memory(address, nbytes);
    if (all != nullptr) return 0;
    const bool begins_in_one = find_memory(address, 1) != nullptr;
    return device || begins_in_one ? kInvalidValue : 0;
}

static int issue_copy(void* target, const void* source, std::size_t nbytes, int kind,
                      cudaStream_t handle) {
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return kInvalidHandle;
    if (kind < 0 || kind > 4) return static_cast<int>(cudaErrorInvalidMemcpyDirection);
    if (nbytes == 0) return stream->capture && !stream->capture->valid ? kCaptureInvalidated : 0;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (target == nullptr || source == nullptr || check_range(target, nbytes, to_device) != 0 ||
        check_range(source, nbytes, from_device) != 0) {
        return kInvalidValue;
    }
    auto work = std::make_shared<Work>();
    work->kind = Kind::copy;
    work->device = stream->device;
    work->target = target;
    work->source = source;
    work->nbytes = nbytes;
    return issue(*stream, std::move(work));
}

TRLOW_ENTRY(cudaMemcpyAsync);
extern "C" cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes,
                                       enum cudaMemcpyKind kind, cudaStream_t stream) {
    TRLOW_CUDA(cudaMemcpyAsync);
    return cuda_result(issue_copy(target, source, nbytes, static_cast<int>(kind), stream));
}

TRLOW_ENTRY(cudaMemcpyPeerAsync);
extern "C" cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                           int source_device, size_t nbytes,
                                           cudaStream_t stream) {
    TRLOW_CUDA(cudaMemcpyPeerAsync);
    {
        const Lock lock(state().mutex);
        const int count = state().device_count;
        if (target_device < 0 || target_device >= count || source_device < 0 ||
            source_device >= count) {
            return cuda_result(kInvalidDevice);
        }
    }
    return cuda_result(issue_copy(target, source, nbytes, cudaMemcpyDeviceToDevice, stream));
}

TRLOW_ENTRY(cudaMemsetAsync);
extern "C" cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes,
                                       cudaStream_t handle) {
    TRLOW_CUDA(cudaMemsetAsync);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (nbytes == 0) return cudaSuccess;
    if (find_memory(target, nbytes) == nullptr) return cuda_result(kInvalidValue);
    auto work = std::make_shared<Work>();
    work->kind = Kind::fill;
    work->device = stream->device;
    work->target = target;
    work->value = value;
    work->nbytes = nbytes;
    return cuda_result(issue(*stream, std::move(work)));
}
