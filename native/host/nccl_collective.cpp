// NCCL: the operations. Arguments are checked before anything is queued.
//
// Invariant: the buffers of a call that was accepted lie in living memory of the communicator's
// device (or in pinned memory) from first to last byte.
#include <algorithm>
#include <cstring>

#include "entry.h"
#include "group.h"

using namespace trlow_host;

namespace {

struct Buffers {
    const void* send = nullptr;
    std::size_t send_count = 0;
    void* recv = nullptr;
    std::size_t recv_count = 0;
};

bool memory_is_good(const void* buffer, std::size_t nbytes, int device) {
    const Allocation* found = find_memory(buffer, nbytes);
    return found != nullptr && (found->pinned || found->device == device);
}

std::string hex(const void* pointer) {
    char text[32];
    std::snprintf(text, sizeof text, "%p", pointer);
    return text;
}

int check_buffer(const char* name, const void* buffer, std::size_t count, std::size_t nbytes,
                 const Comm& comm) {
    if (count == 0) return 0;
    if (count > SIZE_MAX / nbytes || !memory_is_good(buffer, count * nbytes, comm.device)) {
        return refuse(kNcclInvalidArgument,
                      std::string(name) + " " + hex(buffer) + ": its " + std::to_string(count) +
                          " elements do not lie in memory of device " +
                          std::to_string(comm.device));
    }
    return 0;
}

int check_stream(const std::shared_ptr<Stream>& stream, const Comm& comm) {
    if (!stream) return refuse(kNcclInvalidArgument, "the stream does not exist");
    if (stream->device == comm.device) return 0;
    return refuse(kNcclInvalidArgument,
                  "the stream belongs to device " + std::to_string(stream->device) +
                      ", the communicator's rank " + std::to_string(comm.rank) + " to device " +
                      std::to_string(comm.device));
}

// Replaces a user's reduction by its factor.
int resolve(Call& call, int reduction) {
    call.signature.reduction = reduction;
    if (reduction >= 0 && reduction < kPreMulSum) return 0;
    const auto found = call.comm->factors.find(reduction);
    if (found == call.comm->factors.end()) {
        return refuse(kNcclInvalidArgument,
                      "reduction " + std::to_string(reduction) + " does not exist");
    }
    if (found->second.dtype != call.signature.dtype) {
        return refuse(kNcclInvalidArgument, "the reduction was made for another data type");
    }
    call.factor = found->second;
    call.signature.reduction = kPreMulSum;
    return 0;
}

struct Request {
    Op op;
    Buffers buffers;
    std::size_t count;
    int dtype;
    int reduction = 0;
    int root = 0;
    int peer = -1;
};

int check_ranks(const Request& request, const Comm& comm) {
    const int ranks = static_cast<int>(comm.clique->devices.size());
    const int named = request.peer >= 0 ? request.peer : request.root;
    const bool transfer = request.op == Op::send || request.op == Op::recv;
    if (named >= 0 && named < ranks && (!transfer || request.peer >= 0)) return 0;
    return refuse(kNcclInvalidArgument, "root or peer must be 0 to " + std::to_string(ranks - 1) +
                                            ", is " +
                                            std::to_string(transfer ? request.peer : named));
}

ncclResult_t submit(const Request& request, ncclComm_t handle, cudaStream_t stream_handle) {
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm) return nccl_result(refuse(kNcclInvalidArgument, "the communicator does not exist"));
    if (comm->finalized) {
        return nccl_result(refuse(kNcclInvalidUsage, "the communicator was finalized"));
    }
    const std::size_t nbytes = dtype_nbytes(request.dtype);
    if (nbytes == 0) {
        return nccl_result(refuse(kNcclInvalidArgument,
                                  "data type " + std::to_string(request.dtype) + " is unknown"));
    }
    const auto stream = find(state().streams, stream_handle);
    auto call = std::make_shared<Call>();
    call->signature = {request.op, request.count, request.dtype, 0, request.root};
    call->send = request.buffers.send;
    call->recv = request.buffers.recv;
    call->peer = request.peer;
    call->comm = comm;
    const Buffers& b = request.buffers;
    int code = check_stream(stream, *comm);
    if (code == 0) code = check_ranks(request, *comm);
    if (code == 0) code = check_buffer("sendbuff", b.send, b.send_count, nbytes, *comm);
    if (code == 0) code = check_buffer("recvbuff", b.recv, b.recv_count, nbytes, *comm);
    if (code == 0) code = resolve(*call, request.reduction);
    if (code == 0) code = issue_call({std::move(call), stream});
    return nccl_result(code);
}

std::size_t ranks_of(ncclComm_t handle) {
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    return comm ? comm->clique->devices.size() : 1;
}

bool is_rank(ncclComm_t handle, int rank) {
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    return comm && comm->rank == rank;
}

}  // namespace

TRLOW_ENTRY(ncclAllReduce);
extern "C" ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count,
                                      ncclDataType_t dtype, ncclRedOp_t reduction,
                                      ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclAllReduce);
    return submit({Op::all_reduce, {send, count, recv, count}, count, dtype, reduction}, comm,
                  stream);
}

TRLOW_ENTRY(ncclBroadcast);
extern "C" ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count,
                                      ncclDataType_t dtype, int root, ncclComm_t comm,
                                      cudaStream_t stream) {
    TRLOW_NCCL(ncclBroadcast);
    const std::size_t sent = is_rank(comm, root) ? count : 0;  // elsewhere sendbuff is not read
    return submit({Op::broadcast, {send, sent, recv, count}, count, dtype, 0, root}, comm, stream);
}

TRLOW_ENTRY(ncclBcast);
extern "C" ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclBcast);
    return submit({Op::broadcast, {buffer, count, buffer, count}, count, dtype, 0, root}, comm,
                  stream);
}

TRLOW_ENTRY(ncclReduce);
extern "C" ncclResult_t ncclReduce(const void* send, void* recv, size_t count,
                                   ncclDataType_t dtype, ncclRedOp_t reduction, int root,
                                   ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclReduce);
    const std::size_t received = is_rank(comm, root) ? count : 0;
    return submit({Op::reduce, {send, count, recv, received}, count, dtype, reduction, root}, comm,
                  stream);
}

TRLOW_ENTRY(ncclAllGather);
extern "C" ncclResult_t ncclAllGather(const void* send, void* recv, size_t count,
                                      ncclDataType_t dtype, ncclComm_t comm,
                                      cudaStream_t stream) {
    TRLOW_NCCL(ncclAllGather);
    return submit({Op::all_gather, {send, count, recv, count * ranks_of(comm)}, count, dtype},
                  comm, stream);
}

TRLOW_ENTRY(ncclReduceScatter);
extern "C" ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count,
                                          ncclDataType_t dtype, ncclRedOp_t reduction,
                                          ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclReduceScatter);
    return submit({Op::reduce_scatter,
                   {send, count * ranks_of(comm), recv, count},
                   count,
                   dtype,
                   reduction},
                  comm, stream);
}

TRLOW_ENTRY(ncclSend);
extern "C" ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t dtype, int peer,
                                 ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclSend);
    return submit({Op::send, {send, count, nullptr, 0}, count, dtype, 0, 0, peer}, comm, stream);
}

TRLOW_ENTRY(ncclRecv);
extern "C" ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t dtype, int peer,
                                 ncclComm_t comm, cudaStream_t stream) {
    TRLOW_NCCL(ncclRecv);
    return submit({Op::recv, {nullptr, 0, recv, count}, count, dtype, 0, 0, peer}, comm, stream);
}

TRLOW_ENTRY(ncclRedOpCreatePreMulSum);
extern "C" ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar,
                                                 ncclDataType_t dtype,
                                                 ncclScalarResidence_t residence,
                                                 ncclComm_t handle) {
    TRLOW_NCCL(ncclRedOpCreatePreMulSum);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    const std::size_t nbytes = dtype_nbytes(static_cast<int>(dtype));
    if (!comm || out == nullptr || scalar == nullptr || nbytes == 0) {
        return nccl_result(refuse(kNcclInvalidArgument, "ncclRedOpCreatePreMulSum: null or "
                                                        "unknown communicator, scalar or type"));
    }
    if (residence == ncclScalarDevice && !memory_is_good(scalar, nbytes, comm->device)) {
        return nccl_result(refuse(kNcclInvalidArgument, "the factor does not lie in memory of "
                                                        "device " + std::to_string(comm->device)));
    }
    Factor factor;
    factor.dtype = static_cast<int>(dtype);
    factor.on_device = residence == ncclScalarDevice;
    factor.address = scalar;
    if (!factor.on_device) std::memcpy(factor.bytes.data(), scalar, nbytes);
    *out = static_cast<ncclRedOp_t>(comm->next_factor);
    comm->factors[comm->next_factor++] = factor;
    return ncclSuccess;
}

TRLOW_ENTRY(ncclRedOpDestroy);
extern "C" ncclResult_t ncclRedOpDestroy(ncclRedOp_t reduction, ncclComm_t handle) {
    TRLOW_NCCL(ncclRedOpDestroy);
    const Lock lock(state().mutex);
    const auto comm = find_comm(handle);
    if (!comm || comm->factors.erase(static_cast<int>(reduction)) == 0) {
        return nccl_result(refuse(kNcclInvalidArgument, "the reduction does not exist"));
    }
    return ncclSuccess;
}
