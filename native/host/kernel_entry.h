// What a kernel source leaves behind when g++ compiles it into the host device: one KernelEntry
// per kernel and mode, linked into that mode's registry by a static object, and the services
// that a kernel built as blocks of fibers calls. Nothing here knows the device's state.
//
// Invariant: a parameter is exactly 8 bytes. The device copies params * 8 bytes when a launch is
// enqueued or captured, and hands `run` an array of `params` pointers, each to such 8 bytes.
#pragma once

#include <cstddef>

namespace trlow_host {

struct Geometry {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_nbytes;   // dynamic shared memory of the launch; 0 if the kernel asks none
    unsigned long long seed;  // order of the fibers of a block; 0: by thread index
};

struct KernelEntry {
    const char* name;
    int params;
    bool block_kernel;  // TRLOW_BLOCK_KERNEL: one block of 256 threads per work item
    void (*run)(void** params, Geometry geometry);
    KernelEntry* next;
};

// Serial: `run` does the whole work as one thread, whatever the geometry says.
// Fibers: `run` calls fiber_run, which runs the body once per thread of the grid.
enum KernelMode { kSerialKernels = 0, kFiberKernels = 1, kKernelModes = 2 };

// Heads of the two linked lists; constant-initialised, so that static objects may use them.
void register_kernel(KernelMode mode, KernelEntry* entry);
const KernelEntry* find_kernel(KernelMode mode, const char* name);

// `static RegisterKernel here(kSerialKernels, &entry);` in each kernel source.
struct RegisterKernel {
    RegisterKernel(KernelMode mode, KernelEntry* entry) { register_kernel(mode, entry); }
};

// ---- services for kernels built with TRLOW_HOST_FIBERS ------------------------------------

struct FiberPlace {
    unsigned block[3];       // blockIdx
    unsigned thread[3];      // threadIdx
    unsigned grid_size[3];   // gridDim
    unsigned block_size[3];  // blockDim
};

// Runs body(argument) once for every thread of every block; blocks one after another, the
// threads of a block as fibers that may wait for each other in fiber_barrier. Returns when all
// have ended. A barrier that some threads of the block never reach ends the run and becomes the
// launch's error (cudaErrorLaunchFailure, text in ncclGetLastError).
void fiber_run(const Geometry& geometry, void (*body)(void* argument), void* argument);

// Where the calling fiber stands. Valid only below fiber_run.
const FiberPlace& fiber_place();

// __syncthreads of the calling fiber's block.
void fiber_barrier();

// Shared memory of the calling fiber's block: the same address for the same key (the address of
// some static object in the kernel), 16-byte aligned, filled with 0xCB when the block starts.
void* fiber_shared(const void* key, std::size_t nbytes);

}  // namespace trlow_host
