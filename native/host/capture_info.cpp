// What a stream's capture looks like from outside, and changing what its next node depends on.
//
// Invariant: the graph of a capture has a handle from the first time somebody asks for it; it is
// taken back if the capture fails.
#include <algorithm>

#include "entry.h"

using namespace trlow_host;

TRLOW_ENTRY(cuStreamGetCaptureInfo_v3);
extern "C" CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status,
                                              cuuint64_t* identity, CUgraph* graph,
                                              const CUgraphNode** dependencies,
                                              const CUgraphEdgeData** edges, size_t* count) {
    TRLOW_DRIVER(cuStreamGetCaptureInfo_v3);
    // The driver's array lives until the next call on the stream; one per thread is enough here.
    static thread_local std::vector<CUgraphNode> nodes;
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return driver_result(kInvalidHandle);
    if (status == nullptr) return driver_result(kInvalidValue);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!stream->capture) return CUDA_SUCCESS;
    const auto& capture = stream->capture;
    *status = capture->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                             : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    if (!capture->valid) return CUDA_SUCCESS;
    if (identity != nullptr) *identity = reinterpret_cast<cuuint64_t>(capture.get());
    if (graph != nullptr) {
        register_graph(capture->graph);
        *graph = reinterpret_cast<CUgraph>(capture->graph.get());
    }
    nodes.clear();
    for (const int index : stream->tail) {
        const auto& node = capture->graph->nodes[static_cast<std::size_t>(index)];
        nodes.push_back(reinterpret_cast<CUgraphNode>(node.get()));
    }
    if (dependencies != nullptr) *dependencies = nodes.data();
    if (edges != nullptr) *edges = nullptr;  // no edge here has ports
    if (count != nullptr) *count = nodes.size();
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuStreamUpdateCaptureDependencies_v2);
extern "C" CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* nodes,
                                                         const CUgraphEdgeData* edges,
                                                         size_t count, unsigned int flags) {
    TRLOW_DRIVER(cuStreamUpdateCaptureDependencies_v2);
    const Lock lock(state().mutex);
    const auto stream = find(state().streams, handle);
    if (!stream) return driver_result(kInvalidHandle);
    if (!stream->capture) return driver_result(kIllegalState);
    if (!stream->capture->valid) return driver_result(kCaptureInvalidated);
    if ((nodes == nullptr && count > 0) || edges != nullptr ||
        flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) {
        return driver_result(kInvalidValue);
    }
    const auto& all = stream->capture->graph->nodes;
    std::vector<int> tail;
    if (flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES) tail = stream->tail;
    for (std::size_t i = 0; i < count; ++i) {
        const auto at = std::find_if(all.begin(), all.end(), [&](const auto& node) {
            return reinterpret_cast<CUgraphNode>(node.get()) == nodes[i];
        });
        if (at == all.end()) return driver_result(kInvalidValue);
        tail.push_back(static_cast<int>(at - all.begin()));
    }
    std::sort(tail.begin(), tail.end());
    tail.erase(std::unique(tail.begin(), tail.end()), tail.end());
    stream->tail = std::move(tail);
    return CUDA_SUCCESS;
}
