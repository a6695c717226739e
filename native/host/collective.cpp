// How collectives run: a call arrives when its stream comes to it, and the last one to arrive makes
// the one reduction of its instance ready.
//
// Invariant: an instance is in its clique's table from its first call until its last side has
// ended. A side ends with the reduction, or alone when its rank is aborted.
#include "state.h"

namespace trlow_host {

void arrive(Unit& unit) {
    unit.left = 0;
    for (std::size_t i = 0; i < unit.instances.size(); ++i) {
        const Call& call = *unit.work->calls[i];
        if (!unit.instances[i] || call.comm->aborted) continue;
        Instance& instance = *unit.instances[i];
        instance.sides[side_of(instance, call)].unit = &unit;
        ++unit.left;
        if (++instance.arrived < instance.sides.size()) continue;
        instance.running = true;
        push_ready({nullptr, unit.instances[i], unit.lane});
    }
    if (unit.left == 0) state().ended.push_back(&unit);
}

static void side_ended(const Side& side) {
    Comm& comm = *side.call->comm;
    if (side.unit != nullptr && --side.unit->left == 0) state().ended.push_back(side.unit);
    if (--comm.pending == 0) wake_all(comm.waiters);
}

void instance_ended(const std::shared_ptr<Instance>& instance) {
    instance->clique->stalled = false;
    for (const Side& side : instance->sides) side_ended(side);
    erase(*instance);
}

// Ends this rank's side of everything that is not being reduced already.
void abort_pending(Comm& comm) {
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
                side_ended(side);
                if (side.unit != nullptr) --instance->arrived;
                side.unit = nullptr;
            }
            any_left = any_left || (side.call && !side.gone);
        }
        if (!any_left) erase(*instance);
    }
}

}  // namespace trlow_host
