// CUDA driver: devices, contexts, modules, functions, kernel launches.
//
// Invariant: a module belongs to the device that was current when it was loaded, and a kernel runs
// only in a stream of that device. Parameters are copied when the launch is issued.
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>

#include "entry.h"

using namespace trlow_host;

static constexpr char kImage[] = "trlow-host-kernels";
static constexpr int kInvalidImage = 200, kNotFound = 500, kInvalidContext = 201;

static bool valid(int device) { return device >= 0 && device < state().device_count; }

// A context is its device's number, made into a pointer that nobody follows.
static CUcontext context_of(int device) {
    return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device + 1) << 4);
}

TRLOW_ENTRY(cuInit);
extern "C" CUresult cuInit(unsigned int flags) {
    TRLOW_DRIVER(cuInit);
    return driver_result(flags == 0 ? 0 : kInvalidValue);
}

TRLOW_ENTRY(cuDriverGetVersion);
extern "C" CUresult cuDriverGetVersion(int* version) {
    TRLOW_DRIVER(cuDriverGetVersion);
    if (version == nullptr) return driver_result(kInvalidValue);
    *version = 13000;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDeviceGet);
extern "C" CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    TRLOW_DRIVER(cuDeviceGet);
    const Lock lock(state().mutex);
    if (device == nullptr) return driver_result(kInvalidValue);
    if (!valid(ordinal)) return driver_result(kInvalidDevice);
    *device = ordinal;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDeviceGetCount);
extern "C" CUresult cuDeviceGetCount(int* count) {
    TRLOW_DRIVER(cuDeviceGetCount);
    if (count == nullptr) return driver_result(kInvalidValue);
    const Lock lock(state().mutex);
    *count = state().device_count;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDeviceGetName);
extern "C" CUresult cuDeviceGetName(char* name, int nbytes, CUdevice device) {
    TRLOW_DRIVER(cuDeviceGetName);
    const Lock lock(state().mutex);
    if (!valid(device)) return driver_result(kInvalidDevice);
    if (name == nullptr || nbytes < 1) return driver_result(kInvalidValue);
    std::snprintf(name, static_cast<std::size_t>(nbytes), "trlow host device");
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDeviceGetAttribute);
extern "C" CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                         CUdevice device) {
    TRLOW_DRIVER(cuDeviceGetAttribute);
    return driver_result(static_cast<int>(
        cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device)));
}

TRLOW_ENTRY(cuDeviceTotalMem_v2);
extern "C" CUresult cuDeviceTotalMem_v2(size_t* nbytes, CUdevice device) {
    TRLOW_DRIVER(cuDeviceTotalMem_v2);
    if (nbytes == nullptr) return driver_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!valid(device)) return driver_result(kInvalidDevice);
    *nbytes = state().device_nbytes;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDevicePrimaryCtxRetain);
extern "C" CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    TRLOW_DRIVER(cuDevicePrimaryCtxRetain);
    if (context == nullptr) return driver_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!valid(device)) return driver_result(kInvalidDevice);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuDevicePrimaryCtxRelease_v2);
extern "C" CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    TRLOW_DRIVER(cuDevicePrimaryCtxRelease_v2);
    const Lock lock(state().mutex);
    return driver_result(valid(device) ? 0 : kInvalidDevice);
}

TRLOW_ENTRY(cuCtxGetCurrent);
extern "C" CUresult cuCtxGetCurrent(CUcontext* context) {
    TRLOW_DRIVER(cuCtxGetCurrent);
    if (context == nullptr) return driver_result(kInvalidValue);
    *context = context_of(self().device);
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuCtxSetCurrent);
extern "C" CUresult cuCtxSetCurrent(CUcontext context) {
    TRLOW_DRIVER(cuCtxSetCurrent);
    const Lock lock(state().mutex);
    const int device = static_cast<int>(reinterpret_cast<std::uintptr_t>(context) >> 4) - 1;
    if (!valid(device)) return driver_result(kInvalidContext);
    self().device = device;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuCtxGetDevice);
extern "C" CUresult cuCtxGetDevice(CUdevice* device) {
    TRLOW_DRIVER(cuCtxGetDevice);
    if (device == nullptr) return driver_result(kInvalidValue);
    *device = self().device;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuMemGetAddressRange_v2);
extern "C" CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* nbytes,
                                            CUdeviceptr address) {
    TRLOW_DRIVER(cuMemGetAddressRange_v2);
    State& s = state();
    const Lock lock(s.mutex);
    auto next = s.memory.upper_bound(static_cast<std::uintptr_t>(address));
    if (next == s.memory.begin()) return driver_result(kNotFound);
    --next;
    if (address - next->first >= next->second.nbytes) return driver_result(kNotFound);
    if (base != nullptr) *base = next->first;
    if (nbytes != nullptr) *nbytes = next->second.nbytes;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuModuleLoadData);
extern "C" CUresult cuModuleLoadData(CUmodule* out, const void* image) {
    TRLOW_DRIVER(cuModuleLoadData);
    State& s = state();
    if (out == nullptr || image == nullptr) return driver_result(kInvalidValue);
    if (std::strncmp(static_cast<const char*>(image), kImage, sizeof kImage) != 0) {
        return driver_result(kInvalidImage);
    }
    const Lock lock(s.mutex);
    const int code = forbid_unsafe();
    if (code != 0) return driver_result(code);
    auto module = std::make_shared<Module>();
    module->device = self().device;
    module->mode = s.kernel_mode;
    *out = reinterpret_cast<CUmodule>(module.get());
    s.modules[module.get()] = std::move(module);
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuModuleUnload);
extern "C" CUresult cuModuleUnload(CUmodule handle) {
    TRLOW_DRIVER(cuModuleUnload);
    State& s = state();
    const Lock lock(s.mutex);
    const auto module = find(s.modules, handle);
    if (!module) return driver_result(kInvalidHandle);
    for (const auto& entry : module->functions) s.functions.erase(entry.second.get());
    s.modules.erase(handle);
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuModuleGetFunction);
extern "C" CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
    TRLOW_DRIVER(cuModuleGetFunction);
    State& s = state();
    if (out == nullptr || name == nullptr) return driver_result(kInvalidValue);
    const Lock lock(s.mutex);
    const auto module = find(s.modules, handle);
    if (!module) return driver_result(kInvalidHandle);
    auto& function = module->functions[name];
    if (!function) {
        const KernelEntry* kernel = find_kernel(module->mode, name);
        if (kernel == nullptr) {
            module->functions.erase(name);
            return driver_result(kNotFound);
        }
        function = std::make_shared<Function>();
        function->device = module->device;
        function->kernel = kernel;
        s.functions[function.get()] = function;
    }
    *out = reinterpret_cast<CUfunction>(function.get());
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuModuleGetLoadingMode);
extern "C" CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
    TRLOW_DRIVER(cuModuleGetLoadingMode);
    if (mode == nullptr) return driver_result(kInvalidValue);
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuFuncGetAttribute);
extern "C" CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                       CUfunction handle) {
    TRLOW_DRIVER(cuFuncGetAttribute);
    if (value == nullptr) return driver_result(kInvalidValue);
    const Lock lock(state().mutex);
    if (!find(state().functions, handle)) return driver_result(kInvalidHandle);
    const int number = static_cast<int>(attribute);
    if (number < 0 || number > 15) return driver_result(kInvalidValue);
    *value = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuFuncLoad);
extern "C" CUresult cuFuncLoad(CUfunction handle) {
    TRLOW_DRIVER(cuFuncLoad);
    const Lock lock(state().mutex);
    return driver_result(find(state().functions, handle) ? 0 : kInvalidHandle);
}

static bool fits(const unsigned* grid, const unsigned* block) {
    const unsigned long long threads = 1ULL * block[0] * block[1] * block[2];
    return grid[0] >= 1 && grid[0] <= 0x7fffffffu && grid[1] >= 1 && grid[1] <= 65535 &&
           grid[2] >= 1 && grid[2] <= 65535 && threads >= 1 && threads <= 1024;
}

static int kernel_work(const Function& function, const Geometry& geometry, void** params,
                       void** extra, std::shared_ptr<Work>* out) {
    if (!fits(geometry.grid, geometry.block) || geometry.shared_nbytes > 48 << 10) {
        return kInvalidValue;
    }
    if (extra != nullptr) return kNotSupported;
    auto work = std::make_shared<Work>();
    work->kind = Kind::kernel;
    work->device = function.device;
    work->kernel = function.kernel;
    work->geometry = geometry;
    const auto count = static_cast<std::size_t>(work->kernel->params);
    if (params == nullptr && count > 0) return kInvalidValue;
    work->params.resize(count);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(&work->params[i], params[i], 8);
    *out = std::move(work);
    return 0;
}

TRLOW_ENTRY(cuLaunchKernel);
extern "C" CUresult cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x,
                                   unsigned int block_y, unsigned int block_z,
                                   unsigned int shared_nbytes, CUstream stream_handle,
                                   void** params, void** extra) {
    TRLOW_DRIVER(cuLaunchKernel);
    State& s = state();
    const Lock lock(s.mutex);
    const auto function = find(s.functions, handle);
    const auto stream = find(s.streams, stream_handle);
    if (!function || !stream || stream->device != self().device ||
        function->device != stream->device) {
        return driver_result(kInvalidHandle);
    }
    const Geometry geometry = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_nbytes, s.seed};
    std::shared_ptr<Work> work;
    const int code = kernel_work(*function, geometry, params, extra, &work);
    return driver_result(code != 0 ? code : issue(*stream, std::move(work)));
}

TRLOW_ENTRY(cuGraphAddKernelNode_v2);
extern "C" CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph handle,
                                            const CUgraphNode* after, size_t count,
                                            const CUDA_KERNEL_NODE_PARAMS_v2* given) {
    TRLOW_DRIVER(cuGraphAddKernelNode_v2);
    State& s = state();
    const Lock lock(s.mutex);
    const auto graph = find(s.graphs, handle);
    if (!graph || out == nullptr || given == nullptr || (after == nullptr && count > 0)) {
        return driver_result(kInvalidValue);
    }
    const auto function = find(s.functions, given->func);
    if (!function) return driver_result(kInvalidHandle);
    const Geometry geometry = {{given->gridDimX, given->gridDimY, given->gridDimZ},
                               {given->blockDimX, given->blockDimY, given->blockDimZ},
                               given->sharedMemBytes, s.seed};
    std::shared_ptr<Work> work;
    int code = kernel_work(*function, geometry, given->kernelParams, given->extra, &work);
    GraphNode* made = nullptr;
    if (code == 0) {
        code = add_node(*graph, reinterpret_cast<void* const*>(after), count, work, &made);
    }
    if (code == 0) *out = reinterpret_cast<CUgraphNode>(made);
    return driver_result(code);
}
