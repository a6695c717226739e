// What every exported function begins with: it is counted, it can be made to fail, and after a
// fork it refuses. `TRLOW_ENTRY(name)` at file scope makes the call's Site; `enter(site)` is the
// first statement of the function.
//
// Invariant: a call that a test made to fail changes nothing, except that an end (of a capture,
// of a group) still ends.
#pragma once

#include <atomic>

#include "prototypes.h"  // generated from trlow/binding: a definition that differs is an error
#include "state.h"

namespace trlow_host {

struct Site {
    explicit Site(const char* function);
    const char* name;
    std::atomic<long long> calls{0};
    Site* next;
};

// 0; the code that a test asked for; kInitializationError in the child of a fork; kNotPermitted in
// a host function, which runs on a worker and must not wait for one.
int enter(Site& site);

extern std::atomic<bool> forked;

inline cudaError_t cuda_result(int code) {
    if (code != 0) self().last_error = code;
    return static_cast<cudaError_t>(code);
}

inline CUresult driver_result(int code) { return static_cast<CUresult>(code); }

inline ncclResult_t nccl_result(int code) { return static_cast<ncclResult_t>(code); }

#define TRLOW_ENTRY(function) static trlow_host::Site site_##function(#function)
#define TRLOW_CUDA(function)                                                       \
    if (const int injected = trlow_host::enter(site_##function); injected != 0) {  \
        return trlow_host::cuda_result(injected);                                  \
    }
#define TRLOW_DRIVER(function)                                                     \
    if (const int injected = trlow_host::enter(site_##function); injected != 0) {  \
        return trlow_host::driver_result(injected);                                \
    }

// NCCL has no code of its own for a process that forked. An error inside a group poisons it.
int nccl_injected(int code);
#define TRLOW_NCCL(function)                                                       \
    if (const int injected = trlow_host::enter(site_##function); injected != 0) {  \
        return trlow_host::nccl_result(trlow_host::nccl_injected(injected));       \
    }

}  // namespace trlow_host
