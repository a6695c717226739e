// How the calls of all ranks find each other at issue, and how a disagreement reads.
//
// Invariant: the n-th collective of each rank joins instance n of the clique, and equals all calls
// that joined it before. Several calls are joined all or none.
#include "state.h"

namespace trlow_host {

static const char* op_name(Op op) {
    switch (op) {
        case Op::all_reduce: return "all_reduce";
        case Op::broadcast: return "broadcast";
        case Op::reduce: return "reduce";
        case Op::all_gather: return "all_gather";
        case Op::reduce_scatter: return "reduce_scatter";
        case Op::send: return "send";
        default: return "recv";
    }
}

static const char* reduction_name(int reduction) {
    static const char* const names[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
    return names[reduction];
}

static bool transfers(Op op) { return op == Op::send || op == Op::recv; }

static bool reduces(Op op) {
    return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

static bool rooted(Op op) { return op == Op::broadcast || op == Op::reduce; }

std::string describe(const Signature& signature) {
    std::string text = op_name(signature.op);
    text += " of " + std::to_string(signature.count) + " " + dtype_name(signature.dtype);
    if (reduces(signature.op)) text += std::string(", ") + reduction_name(signature.reduction);
    if (rooted(signature.op)) text += ", root " + std::to_string(signature.root);
    return text;
}

static std::string name_of(const Clique& clique) {
    return "communicator " + std::to_string(clique.number) + " (" +
           std::to_string(clique.devices.size()) + " ranks)";
}

static int rank_of(const Instance& instance, std::size_t side) {
    if (instance.sender < 0) return static_cast<int>(side);
    return side == 0 ? instance.sender : instance.receiver;
}

std::string describe(const Instance& instance) {
    std::string arrived, missing;
    for (std::size_t i = 0; i < instance.sides.size(); ++i) {
        const Side& side = instance.sides[i];
        const auto rank = static_cast<std::size_t>(rank_of(instance, i));
        if (side.unit != nullptr) {
            arrived += (arrived.empty() ? "" : ", ") + std::to_string(rank);
            continue;
        }
        missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(rank) + " (device " +
                   std::to_string(instance.clique->devices[rank]) + "), ";
        if (side.gone || instance.clique->comms[rank] == nullptr) {
            missing += "whose communicator is gone";
        } else {
            missing += side.call ? "which has issued it, but whose stream has not come to it"
                                 : "which has not issued it";
        }
    }
    return name_of(*instance.clique) + ", " +
           (instance.sender < 0 ? "collective " : "transfer ") + std::to_string(instance.number) +
           " (" + describe(instance.signature) + "): arrived: ranks " +
           (arrived.empty() ? "none" : arrived) + "; missing: " +
           (missing.empty() ? "none" : missing);
}

static int mismatch(const Instance& instance, const Call& call) {
    set_report("mismatch in " + name_of(*instance.clique) + " at " +
               (instance.sender < 0 ? "collective " : "transfer ") +
               std::to_string(instance.number) + ": rank " + std::to_string(instance.first) +
               " issued " + describe(instance.signature) + ", rank " +
               std::to_string(call.comm->rank) + " issues " + describe(call.signature) +
               "; all ranks must issue the same operations in the same order");
    return kNcclInvalidUsage;
}

static std::shared_ptr<Instance> make_instance(Comm& comm, const Call& call,
                                               std::uint64_t number) {
    auto made = std::make_shared<Instance>();
    made->clique = comm.clique.get();
    made->number = number;
    made->signature = call.signature;
    made->first = comm.rank;
    made->sides.resize(transfers(call.signature.op) ? 2 : comm.clique->devices.size());
    return made;
}

static int join_transfer(const std::shared_ptr<const Call>& call,
                         std::shared_ptr<Instance>& instance) {
    Comm& comm = *call->comm;
    const bool sends = call->signature.op == Op::send;
    const auto peer = static_cast<std::size_t>(call->peer);
    std::uint64_t& number = sends ? comm.sent[peer] : comm.received[peer];
    const int sender = sends ? comm.rank : call->peer, receiver = sends ? call->peer : comm.rank;
    auto& slot = comm.clique->transfers[std::make_tuple(sender, receiver, number)];
    if (!slot) {
        slot = make_instance(comm, *call, number);
        slot->sender = sender;
        slot->receiver = receiver;
    }
    const Signature& other = slot->signature;
    if (other.count != call->signature.count || other.dtype != call->signature.dtype) {
        return mismatch(*slot, *call);
    }
    ++number;
    instance = slot;
    instance->sides[sends ? 0 : 1].call = call;
    return 0;
}

static int join(const std::shared_ptr<const Call>& call, std::shared_ptr<Instance>& instance) {
    Comm& comm = *call->comm;
    instance.reset();
    if (comm.aborted) return 0;  // a graph of a communicator that is gone: without effect
    if (transfers(call->signature.op)) {
        const int code = join_transfer(call, instance);
        if (code == 0) ++comm.pending;
        return code;
    }
    auto& slot = comm.clique->collectives[comm.issued];
    if (!slot) slot = make_instance(comm, *call, comm.issued);
    if (!(slot->signature == call->signature)) return mismatch(*slot, *call);
    ++comm.issued;
    instance = slot;
    instance->sides[static_cast<std::size_t>(comm.rank)].call = call;
    ++comm.pending;
    return 0;
}

std::size_t side_of(const Instance& instance, const Call& call) {
    if (instance.sender < 0) return static_cast<std::size_t>(call.comm->rank);
    return call.signature.op == Op::send ? 0 : 1;
}

void erase(const Instance& instance) {
    Clique& clique = *instance.clique;
    if (instance.sender < 0) {
        clique.collectives.erase(instance.number);
    } else {
        clique.transfers.erase(
            std::make_tuple(instance.sender, instance.receiver, instance.number));
    }
}

static void unjoin(const Call& call, Instance& instance) {
    Comm& comm = *call.comm;
    if (instance.sender < 0) {
        --comm.issued;
    } else {
        auto& numbers = call.signature.op == Op::send ? comm.sent : comm.received;
        --numbers[static_cast<std::size_t>(call.peer)];
    }
    --comm.pending;
    instance.sides[side_of(instance, call)].call.reset();
    instance.first = -1;
    for (std::size_t i = 0; i < instance.sides.size() && instance.first < 0; ++i) {
        if (instance.sides[i].call) instance.first = instance.sides[i].call->comm->rank;
    }
    if (instance.first < 0) erase(instance);
}

int join_all(const std::vector<std::shared_ptr<const Call>>& calls,
             std::vector<std::shared_ptr<Instance>>& instances) {
    for (const auto& call : calls) {
        std::shared_ptr<Instance> instance;
        const int code = join(call, instance);
        if (code == 0) {
            instances.push_back(std::move(instance));
            continue;
        }
        while (!instances.empty()) {
            const auto last = instances.back();
            instances.pop_back();
            if (last) unjoin(*calls[instances.size()], *last);
        }
        return code;
    }
    return 0;
}

}  // namespace trlow_host
