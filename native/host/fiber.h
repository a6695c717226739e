// Blocks of fibers: the threads of one block as coroutines on one host thread, for kernels built
// with TRLOW_HOST_FIBERS. kernel_entry.h has what the kernels call; this is what the device asks.
#pragma once

#include <string>

namespace trlow_host {

// Of the last fiber_run on the calling host thread; reading it clears it.
bool fiber_failed();
const std::string& fiber_failure();

}  // namespace trlow_host
