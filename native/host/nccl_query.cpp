// NCCL: what communicators say of themselves, and memory that other devices can map.
#include "entry.h"
#include "group.h"

using namespace trlow_host;

static int no_comm() {
    return refuse(kNcclInvalidArgument, "the communicator does not exist (null, destroyed or "
                                        "aborted)");
}

static ncclResult_t ask(const void* handle, int* out, int (*question)(const Comm&)) {
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    if (out == nullptr) return ncclInvalidArgument;
    *out = question(*comm);
    return ncclSuccess;
}

TRLOW_ENTRY(ncclCommCount);
extern "C" ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    TRLOW_NCCL(ncclCommCount);
    return ask(comm, count,
               [](const Comm& c) { return static_cast<int>(c.clique->devices.size()); });
}

TRLOW_ENTRY(ncclCommCuDevice);
extern "C" ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    TRLOW_NCCL(ncclCommCuDevice);
    return ask(comm, device, [](const Comm& c) { return c.device; });
}

TRLOW_ENTRY(ncclCommUserRank);
extern "C" ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    TRLOW_NCCL(ncclCommUserRank);
    return ask(comm, rank, [](const Comm& c) { return c.rank; });
}

TRLOW_ENTRY(ncclCommGetAsyncError);
extern "C" ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    TRLOW_NCCL(ncclCommGetAsyncError);
    int code = 0;
    const ncclResult_t result = ask(comm, error == nullptr ? nullptr : &code, [](const Comm& c) {
        return c.clique->stalled ? kNcclRemoteError : 0;
    });
    if (error != nullptr) *error = static_cast<ncclResult_t>(code);
    return result;
}

TRLOW_ENTRY(ncclMemAlloc);
extern "C" ncclResult_t ncclMemAlloc(void** pointer, size_t nbytes) {
    TRLOW_NCCL(ncclMemAlloc);
    if (pointer == nullptr) return ncclInvalidArgument;
    {
        const Lock lock(state().mutex);
        if (forbid_unsafe() != 0) return ncclUnhandledCudaError;
    }
    const int code = allocate(self().device, false, nbytes, pointer, true);
    return code == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

TRLOW_ENTRY(ncclMemFree);
extern "C" ncclResult_t ncclMemFree(void* pointer) {
    TRLOW_NCCL(ncclMemFree);
    Lock lock(state().mutex);
    if (forbid_unsafe() != 0) return ncclUnhandledCudaError;
    for (const auto& entry : state().comms) {
        for (const auto& window : entry.second->windows) {
            if (find_memory(window.second.buffer, 1) == find_memory(pointer, 1)) {
                return nccl_result(refuse(kNcclInvalidUsage, "a window of rank " +
                                                                 std::to_string(entry.second->rank) +
                                                                 " lies on this memory"));
            }
        }
    }
    return release(lock, pointer, false, true) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}
