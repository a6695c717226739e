// NCCL: making and ending communicators, and what they say of themselves.
//
// Invariant: a handle is valid from its communicator's making to its destruction or abort. A
// communicator that a graph can launch cannot be destroyed; its abort waits for the graphs.
#include <cstring>
#include <random>
#include <thread>

#include "entry.h"
#include "meeting.h"

namespace trlow_host {

static constexpr std::chrono::milliseconds kAbortLimit{30000};

std::shared_ptr<Comm> find_comm(const void* handle) { return find(state().comms, handle); }

std::shared_ptr<Clique> make_clique(const std::vector<int>& devices) {
    State& s = state();
    auto clique = std::make_shared<Clique>();
    clique->number = s.cliques_made++;
    clique->devices = devices;
    clique->comms.resize(devices.size());
    s.cliques.insert(clique);
    return clique;
}

std::shared_ptr<Comm> make_comm(const std::shared_ptr<Clique>& clique, int rank) {
    auto comm = std::make_shared<Comm>();
    const auto at = static_cast<std::size_t>(rank);
    comm->clique = clique;
    comm->rank = rank;
    comm->device = clique->devices[at];
    comm->sent.resize(clique->devices.size());
    comm->received.resize(clique->devices.size());
    clique->comms[at] = comm.get();
    state().comms[comm.get()] = comm;
    return comm;
}

static void forget(Comm& comm) {
    State& s = state();
    Clique& clique = *comm.clique;
    clique.comms[static_cast<std::size_t>(comm.rank)] = nullptr;
    s.comms.erase(&comm);
    for (const Comm* each : clique.comms) {
        if (each != nullptr) return;
    }
    s.cliques.erase(comm.clique);
}

static int no_comm() {
    return refuse(kNcclInvalidArgument, "the communicator does not exist (null, destroyed or "
                                        "aborted)");
}

static std::string name_of(const Comm& comm) {
    return "communicator " + std::to_string(comm.clique->number) + ", rank " +
           std::to_string(comm.rank);
}

static int destroy(Lock& lock, const void* handle) {
    const auto comm = find_comm(handle);
    if (!comm) return no_comm();
    const int graphs = comm->graphs;
    if (graphs > 0) {
        return refuse(kNcclInvalidUsage,
                      name_of(*comm) + " cannot be destroyed: graphs that captured it are alive; "
                                       "destroy them first");
    }
    if (!comm->windows.empty()) {
        return refuse(kNcclInvalidUsage, name_of(*comm) + " cannot be destroyed: " +
                                             std::to_string(comm->windows.size()) +
                                             " of its windows are registered");
    }
    if (wait_comm(lock, *comm) != 0) return kNcclRemoteError;
    forget(*comm);
    return 0;
}

static int abort(Lock& lock, const void* handle) {
    const auto comm = find_comm(handle);
    if (!comm) return no_comm();
    comm->aborted = true;
    forget(*comm);
    abort_pending(*comm);
    settle();
    check_stall();  // peers that wait for this rank learn that it is gone
    const auto limit = std::min(kAbortLimit, state().timeout * 10);
    const auto deadline = Clock::now() + limit;
    while (comm->graphs > 0 || comm->pending > 0) {
        if (Clock::now() > deadline) {
            return refuse(kNcclInternalError,
                          name_of(*comm) + " was aborted, but after " +
                              std::to_string(limit.count()) +
                              " ms graphs that captured it are still alive; destroy them");
        }
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        lock.lock();
    }
    return 0;
}

static int check_devices(int count, const std::vector<int>& devices) {
    if (count < 1) return refuse(kNcclInvalidArgument, "a communicator needs at least one rank");
    std::set<int> seen;
    for (const int device : devices) {
        if (device < 0 || device >= state().device_count) {
            return refuse(kNcclInvalidArgument, "device " + std::to_string(device) +
                                                    " does not exist; there are " +
                                                    std::to_string(state().device_count));
        }
        if (!seen.insert(device).second) {
            return refuse(kNcclInvalidUsage,
                          "device " + std::to_string(device) + " is named twice");
        }
    }
    return 0;
}

// Making a communicator allocates, so a capture forbids it.
static int forbid_making() {
    if (forbid_unsafe() == 0) return 0;
    return refuse(static_cast<int>(ncclUnhandledCudaError),
                  "a communicator cannot be made while a stream is capturing");
}

static int check_config(const ncclConfig_t* config) {
    if (config == nullptr) return 0;
    if (config->magic != 0xcafebeef) {
        return refuse(kNcclInvalidArgument, "the configuration's magic number is wrong");
    }
    if (config->blocking == 0) {
        return refuse(kNcclInvalidUsage, "the host device has blocking communicators only");
    }
    return 0;
}

static int take_seat(Lock& lock, const std::string& name, int ranks, int rank, int color, int key,
                     int device, ncclComm_t* out) {
    const auto meeting = find_meeting(name, ranks);
    if (!meeting) return refuse(kNcclInvalidArgument, "ranks of one id name different sizes");
    auto& seat = meeting->seats[static_cast<std::size_t>(rank)];
    if (seat.taken) {
        return refuse(kNcclInvalidUsage, "rank " + std::to_string(rank) + " asks twice");
    }
    seat.taken = true;
    seat.device = device;
    seat.color = color;
    seat.key = key;
    seat.out = reinterpret_cast<void**>(out);
    return join_meeting(lock, {meeting, rank});
}

static int init_rank(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank,
                     const ncclConfig_t* config) {
    Lock lock(state().mutex);
    if (out == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
        return refuse(kNcclInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                std::to_string(ranks) + " does not exist");
    }
    int code = check_config(config);
    if (code == 0) code = forbid_making();
    if (code != 0) return code;
    *out = nullptr;
    const std::string name(id.internal, sizeof id.internal);
    return take_seat(lock, name, ranks, rank, 0, rank, self().device, out);
}

}  // namespace trlow_host

using namespace trlow_host;

TRLOW_ENTRY(ncclGetVersion);
extern "C" ncclResult_t ncclGetVersion(int* version) {
    TRLOW_NCCL(ncclGetVersion);
    if (version == nullptr) return ncclInvalidArgument;
    *version = 22809;
    return ncclSuccess;
}

TRLOW_ENTRY(ncclGetUniqueId);
extern "C" ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    TRLOW_NCCL(ncclGetUniqueId);
    if (id == nullptr) return ncclInvalidArgument;
    static std::atomic<unsigned long long> made{0};
    std::random_device entropy;
    const unsigned long long number = ++made;
    for (std::size_t i = 0; i < sizeof id->internal; ++i) {
        id->internal[i] = static_cast<char>(entropy());
    }
    std::memcpy(id->internal, &number, sizeof number);
    return ncclSuccess;
}

TRLOW_ENTRY(ncclCommInitAll);
extern "C" ncclResult_t ncclCommInitAll(ncclComm_t* out, int count, const int* list) {
    TRLOW_NCCL(ncclCommInitAll);
    const Lock lock(state().mutex);
    std::vector<int> devices;
    for (int i = 0; i < count; ++i) devices.push_back(list == nullptr ? i : list[i]);
    int code = out == nullptr ? kNcclInvalidArgument : check_devices(count, devices);
    if (code == 0) code = forbid_making();
    if (code != 0) return nccl_result(code);
    const auto clique = make_clique(devices);
    for (int i = 0; i < count; ++i) {
        out[i] = reinterpret_cast<ncclComm_t>(make_comm(clique, i).get());
    }
    return ncclSuccess;
}

TRLOW_ENTRY(ncclCommInitRank);
extern "C" ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
    TRLOW_NCCL(ncclCommInitRank);
    return nccl_result(init_rank(out, ranks, id, rank, nullptr));
}

TRLOW_ENTRY(ncclCommInitRankConfig);
extern "C" ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id,
                                               int rank, ncclConfig_t* config) {
    TRLOW_NCCL(ncclCommInitRankConfig);
    return nccl_result(init_rank(out, ranks, id, rank, config));
}

TRLOW_ENTRY(ncclCommSplit);
extern "C" ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out,
                                      ncclConfig_t* config) {
    TRLOW_NCCL(ncclCommSplit);
    Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    int code = out == nullptr || color < NCCL_SPLIT_NOCOLOR ? kNcclInvalidArgument : 0;
    if (code == 0) code = check_config(config);
    if (code == 0) code = forbid_making();
    if (code != 0) return nccl_result(code);
    *out = nullptr;
    const std::string name = "split " + std::to_string(comm->splits++) + " of communicator " +
                             std::to_string(comm->clique->number);
    const int ranks = static_cast<int>(comm->clique->devices.size());
    return nccl_result(
        take_seat(lock, name, ranks, comm->rank, color, key, comm->device, out));
}

TRLOW_ENTRY(ncclCommFinalize);
extern "C" ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    TRLOW_NCCL(ncclCommFinalize);
    Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(no_comm());
    comm->finalized = true;
    return nccl_result(wait_comm(lock, *comm) == 0 ? 0 : kNcclRemoteError);
}

TRLOW_ENTRY(ncclCommDestroy);
extern "C" ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    TRLOW_NCCL(ncclCommDestroy);
    Lock lock(state().mutex);
    return nccl_result(destroy(lock, handle));
}

TRLOW_ENTRY(ncclCommAbort);
extern "C" ncclResult_t ncclCommAbort(ncclComm_t handle) {
    TRLOW_NCCL(ncclCommAbort);
    Lock lock(state().mutex);
    return nccl_result(trlow_host::abort(lock, handle));
}
