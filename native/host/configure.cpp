// The host device's own calls: how many devices, which order, what lives, who issues work.
//
// Invariant: what a living object stands on does not change under it: a device that something
// lives on cannot be taken away, and the order cannot change while work is enqueued.
#include <cstring>

#include "entry.h"

using namespace trlow_host;

static constexpr int kMaxDevices = 4096, kMaxWorkers = 1024;

// The highest device that something lives on, or -1.
static int highest_device_in_use() {
    const State& s = state();
    int highest = -1;
    auto see = [&](int device) { highest = device > highest ? device : highest; };
    for (const auto& entry : s.streams) see(entry.second->device);
    for (const auto& stream : s.draining) see(stream->device);
    for (const auto& entry : s.events) see(entry.second->device);
    for (const auto& entry : s.modules) see(entry.second->device);
    for (const auto& entry : s.comms) see(entry.second->device);
    for (const auto& entry : s.memory) see(entry.second.device);
    return highest;
}

static bool idle() {
    const State& s = state();
    for (const auto& entry : s.streams) {
        if (!entry.second->queue.empty()) return false;
    }
    return s.draining.empty() && s.running == 0;
}

extern "C" trlowHostStatus_t trlowHostConfigure(int devices, int workers, unsigned long long seed,
                                                long long device_nbytes) {
    if (forked) return kInitializationError;
    State& s = state();
    const Lock lock(s.mutex);
    if (devices < 1 || devices > kMaxDevices || workers < 0 || workers > kMaxWorkers ||
        device_nbytes < 0) {
        set_report("trlowHostConfigure: devices must be 1 to 4096, workers 0 (one per core) to "
                   "1024, device_nbytes not negative");
        return kInvalidValue;
    }
    const int highest = highest_device_in_use();
    if (devices <= highest) {
        set_report("trlowHostConfigure: something lives on device " + std::to_string(highest) +
                   ", so there cannot be " + std::to_string(devices) + " devices; free it first");
        return kIllegalState;
    }
    if (!idle() && seed != s.seed) {
        set_report("trlowHostConfigure: the seed cannot change while work is enqueued; "
                   "synchronize first");
        return kIllegalState;
    }
    s.devices.resize(static_cast<std::size_t>(devices));
    s.device_count = devices;
    for (Device& device : s.devices) device.error = 0;
    if (self().device >= devices) self().device = 0;
    if (seed != s.seed) s.random.seed(seed);
    s.seed = seed;
    s.workers = workers;
    s.device_nbytes = device_nbytes == 0 ? std::size_t{16} << 30
                                         : static_cast<std::size_t>(device_nbytes);
    if (s.started > 0) start_workers();
    s.work.notify_all();
    return 0;
}

extern "C" trlowHostStatus_t trlowHostKernelMode(int mode) {
    if (forked) return kInitializationError;
    if (mode < 0 || mode >= kKernelModes) return kInvalidValue;
    const Lock lock(state().mutex);
    state().kernel_mode = static_cast<KernelMode>(mode);
    return 0;
}

extern "C" int trlowHostLive(const char* what) {
    if (forked || what == nullptr) return -1;
    State& s = state();
    const Lock lock(s.mutex);
    const std::string name = what;
    auto size = [](const auto& table) { return static_cast<int>(table.size()); };
    if (name == "streams") return size(s.streams) + size(s.draining);
    if (name == "events") return size(s.events);
    if (name == "execs") return size(s.execs);
    if (name == "comms") return size(s.comms);
    if (name == "captures") return size(s.captures);
    if (name == "modules") return size(s.modules);
    int count = 0;
    if (name == "windows" || name == "reductions") {
        for (const auto& entry : s.comms) {
            count += name == "windows" ? size(entry.second->windows) : size(entry.second->factors);
        }
        return count;
    }
    if (name == "graphs") {
        for (const auto& entry : s.graphs) count += entry.second->owned ? 0 : 1;
        return count;
    }
    if (name != "allocations" && name != "pinned") return -1;
    for (const auto& entry : s.memory) {
        count += entry.second.pinned == (name == "pinned") ? 1 : 0;
    }
    return count;
}

extern "C" trlowHostStatus_t trlowHostIssuerEnter(void) {
    if (forked) return kInitializationError;
    State& s = state();
    const Lock lock(s.mutex);
    if (self().issuer) return kIllegalState;
    self().issuer = true;
    ++s.issuers;
    return 0;
}

extern "C" trlowHostStatus_t trlowHostIssuerLeave(void) {
    if (forked) return kInitializationError;
    State& s = state();
    const Lock lock(s.mutex);
    if (!self().issuer) return kIllegalState;
    self().issuer = false;
    --s.issuers;
    check_stall();
    return 0;
}

extern "C" trlowHostStatus_t trlowHostProgressTimeout(int milliseconds) {
    if (forked) return kInitializationError;
    if (milliseconds < 1) return kInvalidValue;
    const Lock lock(state().mutex);
    state().timeout = std::chrono::milliseconds(milliseconds);
    return 0;
}
