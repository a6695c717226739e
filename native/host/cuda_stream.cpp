// CUDA runtime: streams, capture, host functions.
//
// Invariant: there is no legacy stream; a null handle is refused, since work on it would order
// itself with every other stream of its device.
#include "entry.h"

using namespace trlow_host;

static constexpr int kLeastPriority = 0, kGreatestPriority = -5;

static int create(cudaStream_t* out, unsigned int flags, int priority) {
    State& s = state();
    if (out == nullptr || flags > 1) return kInvalidValue;
    const Lock lock(s.mutex);
    auto stream = std::make_shared<Stream>();
    stream->device = self().device;
    stream->number = s.streams_made++;
    stream->flags = flags;
    stream->priority = priority > kLeastPriority      ? kLeastPriority
                       : priority < kGreatestPriority ? kGreatestPriority
                                                      : priority;
    *out = reinterpret_cast<cudaStream_t>(stream.get());
    s.streams[stream.get()] = std::move(stream);
    return 0;
}

TRLOW_ENTRY(cudaStreamCreateWithFlags);
extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
    TRLOW_CUDA(cudaStreamCreateWithFlags);
    return cuda_result(create(stream, flags, kLeastPriority));
}

TRLOW_ENTRY(cudaStreamCreateWithPriority);
extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags,
                                                    int priority) {
    TRLOW_CUDA(cudaStreamCreateWithPriority);
    return cuda_result(create(stream, flags, priority));
}

TRLOW_ENTRY(cudaStreamDestroy);
extern "C" cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    TRLOW_CUDA(cudaStreamDestroy);
    State& s = state();
    const Lock lock(s.mutex);
    const auto stream = find(s.streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (stream->capture) {
        invalidate(*stream->capture);
        return cuda_result(kCaptureUnsupported);
    }
    s.streams.erase(handle);
    stream->destroyed = true;
    if (!stream->queue.empty()) s.draining.insert(stream);
    return cudaSuccess;
}

// For calls that ask for a stream's progress, which a capture has none of.
static int observable(const std::shared_ptr<Stream>& stream) {
    if (!stream) return kInvalidHandle;
    if (stream->capture) {
        const bool valid = stream->capture->valid;
        invalidate(*stream->capture);
        return valid ? kCaptureUnsupported : kCaptureInvalidated;
    }
    return forbid_disturbing(stream->device);
}

TRLOW_ENTRY(cudaStreamSynchronize);
extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    TRLOW_CUDA(cudaStreamSynchronize);
    Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    const int code = observable(stream);
    return cuda_result(code != 0 ? code : wait_stream(lock, stream));
}

TRLOW_ENTRY(cudaStreamQuery);
extern "C" cudaError_t cudaStreamQuery(cudaStream_t handle) {
    TRLOW_CUDA(cudaStreamQuery);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    const int code = observable(stream);
    if (code != 0) return cuda_result(code);
    if (!stream->queue.empty()) return static_cast<cudaError_t>(kNotReady);
    return cuda_result(state().devices[static_cast<std::size_t>(stream->device)].error);
}

TRLOW_ENTRY(cudaStreamGetFlags);
extern "C" cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned int* flags) {
    TRLOW_CUDA(cudaStreamGetFlags);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (flags == nullptr) return cuda_result(kInvalidValue);
    *flags = stream->flags;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaStreamGetPriority);
extern "C" cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    TRLOW_CUDA(cudaStreamGetPriority);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (priority == nullptr) return cuda_result(kInvalidValue);
    *priority = stream->priority;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaStreamGetId);
extern "C" cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* number) {
    TRLOW_CUDA(cudaStreamGetId);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (number == nullptr) return cuda_result(kInvalidValue);
    *number = stream->number;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaStreamGetDevice);
extern "C" cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
    TRLOW_CUDA(cudaStreamGetDevice);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (device == nullptr) return cuda_result(kInvalidValue);
    *device = stream->device;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaStreamWaitEvent);
extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle,
                                           unsigned int flags) {
    TRLOW_CUDA(cudaStreamWaitEvent);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, stream_handle);
    const auto event = find(state().events, event_handle);
    if (!stream || !event) return cuda_result(kInvalidHandle);
    if (flags != 0) return cuda_result(kNotSupported);
    return cuda_result(wait_event(stream, *event));
}

TRLOW_ENTRY(cudaStreamBeginCapture);
extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                              enum cudaStreamCaptureMode mode) {
    TRLOW_CUDA(cudaStreamBeginCapture);
    const int number = static_cast<int>(mode);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (number < 0 || number > 2) return cuda_result(kInvalidValue);
    return cuda_result(begin_capture(stream, number));
}

// An end that a test made to fail still ends the capture, as CUDA's does with any error.
TRLOW_ENTRY(cudaStreamEndCapture);
extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
    const int injected = enter(site_cudaStreamEndCapture);
    if (forked || self().in_callback) return cuda_result(injected);
    if (out != nullptr) *out = nullptr;
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (injected != 0 && stream && stream->capture) invalidate(*stream->capture);
    std::shared_ptr<Graph> graph;
    int code = out == nullptr ? kInvalidValue : kInvalidHandle;
    if (stream && out != nullptr) code = finish_capture(*stream, graph);
    if (injected != 0 || code != 0) return cuda_result(injected != 0 ? injected : code);
    register_graph(graph);
    *out = reinterpret_cast<cudaGraph_t>(graph.get());
    return cudaSuccess;
}

TRLOW_ENTRY(cudaStreamIsCapturing);
extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                             enum cudaStreamCaptureStatus* status) {
    TRLOW_CUDA(cudaStreamIsCapturing);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    if (status == nullptr) return cuda_result(kInvalidValue);
    *status = !stream->capture          ? cudaStreamCaptureStatusNone
              : stream->capture->valid ? cudaStreamCaptureStatusActive
                                       : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaThreadExchangeStreamCaptureMode);
extern "C" cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
    TRLOW_CUDA(cudaThreadExchangeStreamCaptureMode);
    if (mode == nullptr) return cuda_result(kInvalidValue);
    const int number = static_cast<int>(*mode);
    if (number < 0 || number > 2) return cuda_result(kInvalidValue);
    *mode = static_cast<cudaStreamCaptureMode>(self().capture_mode);
    self().capture_mode = number;
    return cudaSuccess;
}

TRLOW_ENTRY(cudaLaunchHostFunc);
extern "C" cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                          void* argument) {
    TRLOW_CUDA(cudaLaunchHostFunc);
    if (function == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return cuda_result(kInvalidHandle);
    auto work = std::make_shared<Work>();
    work->kind = Kind::callback;
    work->device = stream->device;
    work->callback = function;
    work->argument = argument;
    return cuda_result(issue(*stream, std::move(work)));
}
