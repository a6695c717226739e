// NCCL: memory that a communicator is told of, as plain registrations and as windows.
//
// Invariant: a window lies on memory by ncclMemAlloc of its communicator's device and starts on
// 4096 bytes; the n-th symmetric window has one size on all ranks. It is deregistered when no graph
// of its communicator lives, and before the communicator is destroyed.
#include "entry.h"
#include "group.h"

namespace trlow_host {

static int no_comm() {
    return refuse(kNcclInvalidArgument, "the communicator does not exist (null, destroyed or "
                                        "aborted)");
}

static int add(Comm& comm, Registrations& to, const void* buffer, std::size_t nbytes, bool window,
               void** out) {
    const Allocation* found = find_memory(buffer, nbytes);
    if (out == nullptr || nbytes == 0 || found == nullptr || found->pinned ||
        found->device != comm.device) {
        return refuse(kNcclInvalidArgument, "the buffer does not lie in memory of device " +
                                                std::to_string(comm.device));
    }
    if (window && !found->shared) {
        return refuse(kNcclInvalidArgument, "a window needs memory by ncclMemAlloc");
    }
    if (window && reinterpret_cast<std::uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
        return refuse(kNcclInvalidArgument, "a window must start on 4096 bytes");
    }
    *out = new char;
    to[*out] = {buffer, nbytes};
    return 0;
}

static int remove(Registrations& from, const void* token) {
    if (from.erase(token) == 0) return refuse(kNcclInvalidArgument, "it is not registered here");
    delete static_cast<const char*>(token);
    return 0;
}

static int compare(const Comm& comm, std::size_t nbytes) {
    const std::size_t number = comm.symmetric.size();
    for (const Comm* other : comm.clique->comms) {
        if (other == nullptr || other->symmetric.size() <= number) continue;
        if (other->symmetric[number] == nbytes) continue;
        return refuse(kNcclInvalidUsage,
                      "mismatch at symmetric window " + std::to_string(number) + ": rank " +
                          std::to_string(other->rank) + " has " +
                          std::to_string(other->symmetric[number]) + " bytes, rank " +
                          std::to_string(comm.rank) + " " + std::to_string(nbytes));
    }
    return 0;
}

static int register_window(const WindowWish& wish) {
    Comm& comm = *wish.comm;
    int code = comm.aborted ? no_comm() : 0;
    if (code == 0 && wish.symmetric) code = compare(comm, wish.nbytes);
    void** out = reinterpret_cast<void**>(wish.out);
    if (code == 0) code = add(comm, comm.windows, wish.buffer, wish.nbytes, true, out);
    if (code == 0 && wish.symmetric) comm.symmetric.push_back(wish.nbytes);
    return code;
}

int register_windows(const std::vector<WindowWish>& wishes) {
    for (std::size_t done = 0; done < wishes.size(); ++done) {
        const int code = register_window(wishes[done]);
        if (code == 0) continue;
        while (done-- > 0) {
            const WindowWish& wish = wishes[done];
            remove(wish.comm->windows, *wish.out);
            if (wish.symmetric) wish.comm->symmetric.pop_back();
            *wish.out = nullptr;
        }
        return code;
    }
    return 0;
}

}  // namespace trlow_host

using namespace trlow_host;

TRLOW_ENTRY(ncclCommRegister);
extern "C" ncclResult_t ncclCommRegister(const ncclComm_t handle, void* buffer, size_t nbytes,
                                         void** out) {
    TRLOW_NCCL(ncclCommRegister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    return nccl_result(add(*comm, comm->registrations, buffer, nbytes, false, out));
}

TRLOW_ENTRY(ncclCommDeregister);
extern "C" ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* token) {
    TRLOW_NCCL(ncclCommDeregister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    return nccl_result(comm ? remove(comm->registrations, token) : no_comm());
}

// In a group it happens at the group's end.
TRLOW_ENTRY(ncclCommWindowRegister);
extern "C" ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* buffer, size_t nbytes,
                                               ncclWindow_t* out, int flags) {
    TRLOW_NCCL(ncclCommWindowRegister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    if (out == nullptr) return nccl_result(refuse(kNcclInvalidArgument, "no place for a window"));
    *out = nullptr;
    const bool symmetric = (flags & NCCL_WIN_COLL_SYMMETRIC) != 0;
    const WindowWish wish{comm, buffer, nbytes, out, symmetric};
    if (group().depth == 0) return nccl_result(register_windows({wish}));
    group().windows.push_back(wish);
    return ncclSuccess;
}

TRLOW_ENTRY(ncclCommWindowDeregister);
extern "C" ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
    TRLOW_NCCL(ncclCommWindowDeregister);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    if (comm->graphs > 0) {
        return nccl_result(refuse(kNcclInvalidUsage,
                                  "a window cannot be deregistered: graphs that captured its "
                                  "communicator are alive; destroy them first"));
    }
    return nccl_result(remove(comm->windows, window));
}
