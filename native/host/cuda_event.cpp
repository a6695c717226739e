// CUDA runtime: events.
//
// Invariant: an event's meaning is its last record; waits that were issued before keep the record
// that they saw.
#include "entry.h"

using namespace trlow_host;

TRLOW_ENTRY(cudaEventCreateWithFlags);
extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned int flags) {
    TRLOW_CUDA(cudaEventCreateWithFlags);
    if (out == nullptr || flags > 7) return cuda_result(kInvalidValue);
    State& s = state();
    const Lock lock(s.mutex);
    auto event = std::make_shared<Event>();
    event->device = self().device;
    event->timed = (flags & cudaEventDisableTiming) == 0;
    *out = reinterpret_cast<cudaEvent_t>(event.get());
    s.events[event.get()] = std::move(event);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaEventDestroy);
extern "C" cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    TRLOW_CUDA(cudaEventDestroy);
    const Lock lock(state().mutex);
    return cuda_result(state().events.erase(handle) == 1 ? 0 : kInvalidHandle);
}

static int record(cudaEvent_t event_handle, cudaStream_t stream_handle) {
    const Lock lock(state().mutex);
    const auto event = find(state().events, event_handle);
    const auto stream = find(state().streams, stream_handle);
    if (!event || !stream || event->device != stream->device) return kInvalidHandle;
    return record_event(*event, *stream);
}

TRLOW_ENTRY(cudaEventRecord);
extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    TRLOW_CUDA(cudaEventRecord);
    return cuda_result(record(event, stream));
}

TRLOW_ENTRY(cudaEventRecordWithFlags);
extern "C" cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                unsigned int flags) {
    TRLOW_CUDA(cudaEventRecordWithFlags);
    if (flags != 0) return cuda_result(kNotSupported);
    return cuda_result(record(event, stream));
}

// For calls that ask for an event's progress.
static int observable(const std::shared_ptr<Event>& event) {
    if (!event) return kInvalidHandle;
    if (event->capture) {
        invalidate(*event->capture);
        return kCapturedEvent;
    }
    return forbid_disturbing(event->device);
}

TRLOW_ENTRY(cudaEventQuery);
extern "C" cudaError_t cudaEventQuery(cudaEvent_t handle) {
    TRLOW_CUDA(cudaEventQuery);
    State& s = state();
    const Lock lock(s.mutex);
    const auto event = find(s.events, handle);
    const int code = observable(event);
    if (code != 0) return cuda_result(code);
    if (event->point && !event->point->done) return static_cast<cudaError_t>(kNotReady);
    return cuda_result(s.devices[static_cast<std::size_t>(event->device)].error);
}

TRLOW_ENTRY(cudaEventSynchronize);
extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    TRLOW_CUDA(cudaEventSynchronize);
    State& s = state();
    Lock lock(s.mutex);
    const auto event = find(s.events, handle);
    int code = observable(event);
    if (code == 0 && event->point) code = wait_point(lock, event->point);
    if (code == 0) code = s.devices[static_cast<std::size_t>(event->device)].error;
    return cuda_result(code);
}

TRLOW_ENTRY(cudaEventElapsedTime);
extern "C" cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle,
                                            cudaEvent_t end_handle) {
    TRLOW_CUDA(cudaEventElapsedTime);
    if (milliseconds == nullptr) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    const auto start = find(state().events, start_handle);
    const auto end = find(state().events, end_handle);
    if (!start || !end || !start->timed || !end->timed || start->device != end->device) {
        return cuda_result(kInvalidHandle);
    }
    if (start->capture || end->capture) return cuda_result(kCapturedEvent);
    if (!start->point || !end->point) return cuda_result(kInvalidHandle);
    if (!start->point->done || !end->point->done) return static_cast<cudaError_t>(kNotReady);
    *milliseconds =
        std::chrono::duration<float, std::milli>(end->point->when - start->point->when).count();
    return cudaSuccess;
}
