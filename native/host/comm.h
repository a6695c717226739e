// Communicators: a Clique is all its ranks, a Comm one rank's handle, a Call one rank's side of an
// operation, an Instance the meeting of the calls that belong together.
//
// Invariant: the n-th collective of a rank joins the clique's n-th instance. An instance is
// reduced once, by whoever comes last, and only if no rank of it has been aborted.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <tuple>

#include "objects.h"

namespace trlow_host {

enum class Op { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, recv };

// Everything in which the ranks of one operation must agree.
struct Signature {
    Op op = Op::all_reduce;
    std::size_t count = 0;
    int dtype = 0;
    int reduction = 0;  // ncclRedOp_t; kPreMulSum for every reduction made by the user
    int root = 0;
    bool operator==(const Signature& other) const {
        return op == other.op && count == other.count && dtype == other.dtype &&
               reduction == other.reduction && root == other.root;
    }
};

inline constexpr int kPreMulSum = 5;

// A reduction made by ncclRedOpCreatePreMulSum: the factor of one rank.
struct Factor {
    int dtype = 0;
    bool on_device = false;
    const void* address = nullptr;   // device residence: read when the collective runs
    std::array<unsigned char, 8> bytes{};  // host residence: read when it was made
};

struct Call {
    Signature signature;
    const void* send = nullptr;
    void* recv = nullptr;
    int peer = -1;  // send, recv
    Factor factor;
    std::shared_ptr<Comm> comm;
};

struct Side {
    std::shared_ptr<const Call> call;  // null: this rank has not issued it
    Unit* unit = nullptr;              // null: its stream has not come to it
    bool gone = false;                 // aborted: ended without effect
};

struct Instance {
    Clique* clique = nullptr;
    std::uint64_t number = 0;
    Signature signature;
    std::vector<Side> sides;  // by rank; of a send and receive: sender, receiver
    int first = -1;           // the rank that issued it first
    std::size_t arrived = 0;
    bool running = false;
    int sender = -1, receiver = -1;  // of a send and receive
};

// What the ranks captured, by rank, capture and position; compared while captures are open.
struct Ledger {
    struct Record {
        const Capture* capture = nullptr;  // null: ended
        std::vector<Signature> calls;
    };
    bool comparable = true;  // false once a capture of this round failed
    std::vector<std::vector<Record>> ranks;
};

struct Clique {
    int number = 0;
    std::vector<int> devices;
    std::vector<Comm*> comms;  // null once destroyed or aborted
    std::map<std::uint64_t, std::shared_ptr<Instance>> collectives;
    std::map<std::tuple<int, int, std::uint64_t>, std::shared_ptr<Instance>> transfers;
    Ledger ledger;
    bool stalled = false;
};

// Memory that a communicator was told of; known by a byte of its own.
struct Registration {
    const void* buffer = nullptr;
    std::size_t nbytes = 0;
};
using Registrations = std::map<const void*, Registration>;

struct Comm {
    ~Comm() {  // an abort takes them with it
        for (const auto& each : windows) delete static_cast<const char*>(each.first);
        for (const auto& each : registrations) delete static_cast<const char*>(each.first);
    }
    std::shared_ptr<Clique> clique;
    int rank = 0, device = 0;
    bool aborted = false, finalized = false;
    std::uint64_t issued = 0;  // collectives
    std::vector<std::uint64_t> sent, received;
    std::uint64_t splits = 0;
    std::atomic<int> graphs{0};  // Holds that live
    int pending = 0;             // issued and not ended
    std::vector<Waiter*> waiters;  // for pending == 0
    std::map<int, Factor> factors;
    int next_factor = kPreMulSum;
    Registrations windows, registrations;
    std::vector<std::size_t> symmetric;  // sizes of the symmetric windows made so far, in order
};

}  // namespace trlow_host
