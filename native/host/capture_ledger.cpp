// Comparing what the ranks capture, while they capture it. NCCL wants capture to be collective:
// the same operations in the same order on all ranks, or none (field facts, section 2).
//
// Invariant: a round begins when a communicator has no open capture. In a round, call i of a
// rank's k-th capture must equal call i of every other rank's k-th capture. A capture that failed
// ends the comparing for the rest of its round: its peers will be given up too.
#include "state.h"

namespace trlow_host {

static bool any_open(const Ledger& ledger) {
    for (const auto& records : ledger.ranks) {
        for (const auto& record : records) {
            if (record.capture != nullptr) return true;
        }
    }
    return false;
}

static std::size_t record_of(Ledger& ledger, std::size_t rank, const Capture& capture) {
    auto& records = ledger.ranks[rank];
    for (std::size_t i = 0; i < records.size(); ++i) {
        if (records[i].capture == &capture) return i;
    }
    if (!any_open(ledger)) {
        for (auto& each : ledger.ranks) each.clear();
        ledger.comparable = true;
    }
    records.push_back({&capture, {}});
    return records.size() - 1;
}

int compare_captured(const Call& call, Capture& capture) {
    Clique& clique = *call.comm->clique;
    Ledger& ledger = clique.ledger;
    ledger.ranks.resize(clique.devices.size());
    if (call.signature.op == Op::send || call.signature.op == Op::recv) return 0;
    const auto rank = static_cast<std::size_t>(call.comm->rank);
    const std::size_t at = record_of(ledger, rank, capture);
    capture.cliques.insert(call.comm->clique);
    auto& calls = ledger.ranks[rank][at].calls;
    const std::size_t position = calls.size();
    for (std::size_t other = 0; ledger.comparable && other < ledger.ranks.size(); ++other) {
        const auto& records = ledger.ranks[other];
        if (other == rank || records.size() <= at) continue;
        if (records[at].calls.size() <= position) continue;
        const Signature& theirs = records[at].calls[position];
        if (theirs == call.signature) continue;
        set_report("mismatch in communicator " + std::to_string(clique.number) +
                   " at captured collective " + std::to_string(position) + ": rank " +
                   std::to_string(other) + " captured " + describe(theirs) + ", rank " +
                   std::to_string(rank) + " captures " + describe(call.signature) +
                   "; all ranks must capture the same operations in the same order");
        return kNcclInvalidUsage;
    }
    calls.push_back(call.signature);
    return 0;
}

void close_ledgers(Capture& capture, bool failed) {
    for (const auto& clique : capture.cliques) {
        for (auto& records : clique->ledger.ranks) {
            for (auto& record : records) {
                if (record.capture == &capture) record.capture = nullptr;
            }
        }
        if (failed) clique->ledger.comparable = false;
    }
    capture.cliques.clear();
}

}  // namespace trlow_host
