// CUDA runtime: graphs and executable graphs.
//
// Invariant: a graph inside a child node belongs to its parent; its handle is good for questions
// as long as the parent lives, and cannot be destroyed.
#include <cstdio>
#include <fstream>

#include "entry.h"

using namespace trlow_host;

static std::shared_ptr<Graph> find_graph(cudaGraph_t handle) {
    return find(state().graphs, handle);
}

static void adopt(std::shared_ptr<Graph> graph, cudaGraph_t* out) {
    *out = reinterpret_cast<cudaGraph_t>(graph.get());
    register_graph(graph);
}

TRLOW_ENTRY(cudaGraphCreate);
extern "C" cudaError_t cudaGraphCreate(cudaGraph_t* out, unsigned int flags) {
    TRLOW_CUDA(cudaGraphCreate);
    if (out == nullptr || flags != 0) return cuda_result(kInvalidValue);
    const Lock lock(state().mutex);
    adopt(std::make_shared<Graph>(), out);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphDestroy);
extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    TRLOW_CUDA(cudaGraphDestroy);
    const Lock lock(state().mutex);
    const auto graph = find_graph(handle);
    if (!graph || graph->owned) return cuda_result(kInvalidValue);
    unregister_graph(*graph);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphClone);
extern "C" cudaError_t cudaGraphClone(cudaGraph_t* out, cudaGraph_t handle) {
    TRLOW_CUDA(cudaGraphClone);
    const Lock lock(state().mutex);
    const auto graph = find_graph(handle);
    if (!graph || out == nullptr) return cuda_result(kInvalidValue);
    adopt(clone(*graph), out);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphInstantiate);
extern "C" cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t handle,
                                            unsigned long long flags) {
    TRLOW_CUDA(cudaGraphInstantiate);
    State& s = state();
    const Lock lock(s.mutex);
    const auto graph = find_graph(handle);
    if (!graph || out == nullptr) return cuda_result(kInvalidValue);
    if (flags != 0) return cuda_result(kNotSupported);
    const int code = forbid_unsafe();
    if (code != 0) return cuda_result(code);
    auto exec = instantiate(*graph);
    *out = reinterpret_cast<cudaGraphExec_t>(exec.get());
    s.execs[exec.get()] = std::move(exec);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphExecDestroy);
extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    TRLOW_CUDA(cudaGraphExecDestroy);
    const Lock lock(state().mutex);
    return cuda_result(state().execs.erase(handle) == 1 ? 0 : kInvalidValue);
}

TRLOW_ENTRY(cudaGraphLaunch);
extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t exec_handle, cudaStream_t stream_handle) {
    TRLOW_CUDA(cudaGraphLaunch);
    const Lock lock(state().mutex);
    const auto exec = find(state().execs, exec_handle);
    const auto stream = find(state().streams, stream_handle);
    if (!exec) return cuda_result(kInvalidValue);
    if (!stream || stream->device != self().device) return cuda_result(kInvalidHandle);
    return cuda_result(launch(*stream, exec));
}

TRLOW_ENTRY(cudaGraphUpload);
extern "C" cudaError_t cudaGraphUpload(cudaGraphExec_t exec_handle, cudaStream_t stream_handle) {
    TRLOW_CUDA(cudaGraphUpload);
    const Lock lock(state().mutex);
    const auto exec = find(state().execs, exec_handle);
    const auto stream = find(state().streams, stream_handle);
    if (!exec) return cuda_result(kInvalidValue);
    if (!stream || stream->device != self().device) return cuda_result(kInvalidHandle);
    return cuda_result(stream->capture ? kCaptureUnsupported : 0);
}

static cudaError_t list_nodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count,
                              bool roots) {
    const Lock lock(state().mutex);
    const auto graph = find_graph(handle);
    if (!graph || count == nullptr) return cuda_result(kInvalidValue);
    std::vector<cudaGraphNode_t> found;
    for (const auto& node : graph->nodes) {
        if (roots && !node->after.empty()) continue;
        found.push_back(reinterpret_cast<cudaGraphNode_t>(node.get()));
    }
    if (nodes != nullptr) {
        for (std::size_t i = 0; i < *count; ++i) nodes[i] = i < found.size() ? found[i] : nullptr;
        if (*count < found.size()) return cudaSuccess;
    }
    *count = found.size();
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphGetNodes);
extern "C" cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                         size_t* count) {
    TRLOW_CUDA(cudaGraphGetNodes);
    return list_nodes(graph, nodes, count, false);
}

TRLOW_ENTRY(cudaGraphGetRootNodes);
extern "C" cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                             size_t* count) {
    TRLOW_CUDA(cudaGraphGetRootNodes);
    return list_nodes(graph, nodes, count, true);
}

TRLOW_ENTRY(cudaGraphNodeGetType);
extern "C" cudaError_t cudaGraphNodeGetType(cudaGraphNode_t handle,
                                            enum cudaGraphNodeType* type) {
    TRLOW_CUDA(cudaGraphNodeGetType);
    const Lock lock(state().mutex);
    const GraphNode* node = find_node(handle);
    if (node == nullptr || type == nullptr) return cuda_result(kInvalidValue);
    const Kind kind = node->work->kind;
    *type = kind == Kind::collective ? cudaGraphNodeTypeKernel
                                     : static_cast<cudaGraphNodeType>(kind);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphChildGraphNodeGetGraph);
extern "C" cudaError_t cudaGraphChildGraphNodeGetGraph(cudaGraphNode_t handle, cudaGraph_t* out) {
    TRLOW_CUDA(cudaGraphChildGraphNodeGetGraph);
    const Lock lock(state().mutex);
    const GraphNode* node = find_node(handle);
    if (node == nullptr || out == nullptr || node->work->kind != Kind::child) {
        return cuda_result(kInvalidValue);
    }
    *out = reinterpret_cast<cudaGraph_t>(node->work->child.get());
    return cudaSuccess;
}

static int add(cudaGraphNode_t* out, cudaGraph_t handle, const cudaGraphNode_t* after,
               size_t count, const std::shared_ptr<const Work>& work) {
    const auto graph = find_graph(handle);
    if (out == nullptr || !graph || (after == nullptr && count > 0)) return kInvalidValue;
    GraphNode* made = nullptr;
    const int code = add_node(*graph, reinterpret_cast<void* const*>(after), count, work, &made);
    if (code == 0) *out = reinterpret_cast<cudaGraphNode_t>(made);
    return code;
}

TRLOW_ENTRY(cudaGraphAddEmptyNode);
extern "C" cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* out, cudaGraph_t graph,
                                             const cudaGraphNode_t* after, size_t count) {
    TRLOW_CUDA(cudaGraphAddEmptyNode);
    const Lock lock(state().mutex);
    return cuda_result(add(out, graph, after, count, std::make_shared<const Work>()));
}

TRLOW_ENTRY(cudaGraphAddChildGraphNode);
extern "C" cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t* out, cudaGraph_t handle,
                                                  const cudaGraphNode_t* after, size_t count,
                                                  cudaGraph_t child_handle) {
    TRLOW_CUDA(cudaGraphAddChildGraphNode);
    const Lock lock(state().mutex);
    const auto child = find_graph(child_handle);
    if (!child || child_handle == handle) return cuda_result(kInvalidValue);
    const auto work = child_work(*child);
    const int code = add(out, handle, after, count, work);
    if (code != 0) return cuda_result(code);
    auto& holds = find_graph(handle)->holds;
    holds.insert(holds.end(), child->holds.begin(), child->holds.end());
    register_graph(work->child);
    return cudaSuccess;
}

TRLOW_ENTRY(cudaGraphDebugDotPrint);
extern "C" cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path,
                                              unsigned int) {
    TRLOW_CUDA(cudaGraphDebugDotPrint);
    const Lock lock(state().mutex);
    const auto graph = find_graph(handle);
    if (!graph || path == nullptr) return cuda_result(kInvalidValue);
    std::ofstream file(path);
    file << "digraph {\n";
    for (std::size_t i = 0; i < graph->nodes.size(); ++i) {
        file << "  n" << i << " [label=\"" << describe(*graph->nodes[i]->work) << "\"];\n";
        for (const int from : graph->nodes[i]->after) {
            file << "  n" << from << " -> n" << i << ";\n";
        }
    }
    file << "}\n";
    file.close();
    return cuda_result(file ? 0 : static_cast<int>(cudaErrorOperatingSystem));
}
