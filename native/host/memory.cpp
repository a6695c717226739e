// Device and pinned memory: ordinary memory with a device's name on it.
//
// Invariant: State::memory holds every living allocation by its first byte; they are disjoint, and
// the sum of a device's is at most device_nbytes. New memory is never zero: it holds 0xCB.
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace trlow_host {

static constexpr std::size_t kAlignment = 4096;
static constexpr std::size_t kCanaryLimit = 64 << 20;  // larger memory comes as the system gives it

const Allocation* find_memory(const void* address, std::size_t nbytes) {
    const auto& memory = state().memory;
    const auto first = reinterpret_cast<std::uintptr_t>(address);
    auto next = memory.upper_bound(first);
    if (next == memory.begin()) return nullptr;
    --next;
    const std::size_t offset = first - next->first;
    if (offset > next->second.nbytes || nbytes > next->second.nbytes - offset) return nullptr;
    return &next->second;
}

int allocate(int device, bool pinned, std::size_t nbytes, void** pointer, bool shared) {
    State& s = state();
    *pointer = nullptr;
    if (nbytes == 0) return 0;
    std::size_t& used = s.devices[static_cast<std::size_t>(device)].used;
    {
        Lock lock(s.mutex);
        if (nbytes > SIZE_MAX - kAlignment) return kMemoryAllocation;
        if (!pinned && (used > s.device_nbytes || nbytes > s.device_nbytes - used)) {
            return kMemoryAllocation;
        }
        if (!pinned) used += nbytes;
    }
    void* memory = nullptr;
    const std::size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    const int error = posix_memalign(&memory, kAlignment, rounded);
    if (error == 0 && nbytes <= kCanaryLimit) std::memset(memory, 0xCB, rounded);
    Lock lock(s.mutex);
    if (error != 0) {
        if (!pinned) used -= nbytes;
        return kMemoryAllocation;
    }
    s.memory[reinterpret_cast<std::uintptr_t>(memory)] = {nbytes, device, pinned, shared};
    *pointer = memory;
    return 0;
}

// Waits for the device first, as CUDA does: work that is enqueued may use the memory.
int release(Lock& lock, void* pointer, bool pinned, bool shared) {
    State& s = state();
    if (pointer == nullptr) return 0;
    const auto key = reinterpret_cast<std::uintptr_t>(pointer);
    auto found = s.memory.find(key);
    if (found == s.memory.end() || found->second.pinned != pinned ||
        found->second.shared != shared) {
        return kInvalidValue;
    }
    const int code = wait_device(lock, found->second.device);
    if (code == kLaunchTimeout) return code;
    found = s.memory.find(key);
    if (found == s.memory.end()) return kInvalidValue;
    if (!pinned) {
        s.devices[static_cast<std::size_t>(found->second.device)].used -= found->second.nbytes;
    }
    s.memory.erase(found);
    lock.unlock();
    std::free(pointer);
    lock.lock();
    return 0;
}

}  // namespace trlow_host
