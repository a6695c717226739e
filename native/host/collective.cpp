// How collectives run: a call arrives when its stream comes to it, and the last one to arrive makes
// the one reduction of its instance ready.
//
// Invariant: an instance is in its clique's table from its first call until its last side has
// ended. A side ends with the reduction, or alone when its rank is aborted.
#include "state.h"

namespace trlow_host {

void arrive(Unit& unit) {
    State& s = state();
    const Call& call = *unit.work->call;
    if (!unit.instance || call.comm->aborted) {
        s.ended.push_back(&unit);
        return;
    }
    Instance& instance = *unit.instance;
    instance.sides[side_of(instance, call)].unit = &unit;
    if (++instance.arrived < instance.sides.size()) return;
    instance.running = true;
    push_ready({nullptr, unit.instance, unit.lane});
}

static void side_ended(Comm& comm) {
    if (--comm.pending == 0) wake_all(comm.waiters);
}

void instance_ended(const std::shared_ptr<Instance>& instance) {
    State& s = state();
    instance->clique->stalled = false;
    for (Side& side : instance->sides) {
        s.ended.push_back(side.unit);
        side_ended(*side.call->comm);
    }
    erase(*instance);
}

// Ends this rank's side of everything that is not being reduced already.
void abort_pending(Comm& comm) {
    State& s = state();
    Clique& clique = *comm.clique;
    std::vector<std::shared_ptr<Instance>> instances;
    for (const auto& entry : clique.collectives) instances.push_back(entry.second);
    for (const auto& entry : clique.transfers) instances.push_back(entry.second);
    for (const auto& instance : instances) {
        if (instance->running) continue;
        bool any_left = false;
        for (Side& side : instance->sides) {
            if (side.call && side.call->comm.get() == &comm && !side.gone) {
                side.gone = true;
                if (side.unit != nullptr) s.ended.push_back(side.unit);
                if (side.unit != nullptr) --instance->arrived;
                side.unit = nullptr;
                side_ended(comm);
            }
            any_left = any_left || (side.call && !side.gone);
        }
        if (!any_left) erase(*instance);
    }
}

}  // namespace trlow_host
