// The kernels of this library, one list per mode. The heads are constant-initialised, because the
// static objects of the kernel sources register themselves in no particular order.
#include <cstring>

#include "kernel_entry.h"

namespace trlow_host {

static KernelEntry* heads[kKernelModes] = {nullptr, nullptr};

void register_kernel(KernelMode mode, KernelEntry* entry) {
    entry->next = heads[mode];
    heads[mode] = entry;
}

const KernelEntry* find_kernel(KernelMode mode, const char* name) {
    for (const KernelEntry* entry = heads[mode]; entry != nullptr; entry = entry->next) {
        if (std::strcmp(entry->name, name) == 0) return entry;
    }
    return nullptr;
}

}  // namespace trlow_host
