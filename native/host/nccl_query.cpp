// NCCL: what communicators say of themselves, memory, registrations and windows.
//
// Invariant: a window's memory lies on its communicator's device and starts on 4096 bytes.
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
    const int code = allocate(self().device, false, nbytes, pointer);
    return code == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

TRLOW_ENTRY(ncclMemFree);
extern "C" ncclResult_t ncclMemFree(void* pointer) {
    TRLOW_NCCL(ncclMemFree);
    Lock lock(state().mutex);
    if (forbid_unsafe() != 0) return ncclUnhandledCudaError;
    return release(lock, pointer, false) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

// A registration is known by a byte of its own.
static int add(const Comm& comm, std::set<const void*>& set, const void* buffer, size_t nbytes,
               void** out) {
    const Allocation* found = find_memory(buffer, nbytes);
    if (out == nullptr || nbytes == 0 || found == nullptr || found->pinned ||
        found->device != comm.device) {
        return refuse(kNcclInvalidArgument, "the buffer does not lie in memory of device " +
                                                std::to_string(comm.device));
    }
    *out = new char;
    set.insert(*out);
    return 0;
}

static int remove(std::set<const void*>& set, const void* token) {
    if (set.erase(token) == 0) return refuse(kNcclInvalidArgument, "it is not registered here");
    delete static_cast<const char*>(token);
    return 0;
}

TRLOW_ENTRY(ncclCommRegister);
extern "C" ncclResult_t ncclCommRegister(const ncclComm_t handle, void* buffer, size_t nbytes,
                                         void** out) {
    TRLOW_NCCL(ncclCommRegister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    return nccl_result(add(*comm, comm->registrations, buffer, nbytes, out));
}

TRLOW_ENTRY(ncclCommDeregister);
extern "C" ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* token) {
    TRLOW_NCCL(ncclCommDeregister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    return nccl_result(comm ? remove(comm->registrations, token) : no_comm());
}

TRLOW_ENTRY(ncclCommWindowRegister);
extern "C" ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* buffer, size_t nbytes,
                                               ncclWindow_t* out, int) {
    TRLOW_NCCL(ncclCommWindowRegister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    if (reinterpret_cast<std::uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
        return nccl_result(refuse(kNcclInvalidArgument, "a window must start on 4096 bytes"));
    }
    return nccl_result(
        add(*comm, comm->windows, buffer, nbytes, reinterpret_cast<void**>(out)));
}

TRLOW_ENTRY(ncclCommWindowDeregister);
extern "C" ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
    TRLOW_NCCL(ncclCommWindowDeregister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    return nccl_result(comm ? remove(comm->windows, window) : no_comm());
}
