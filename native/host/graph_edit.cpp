// CUDA driver: questions about a graph's nodes, and changes of their order.
//
// Invariant: after a change the nodes stand again in an order in which every node comes after those
// it depends on.
#include <algorithm>

#include "entry.h"

using namespace trlow_host;

// The graph of a node, as what may be changed; null for one that is gone.
static std::shared_ptr<Graph> graph_of(const GraphNode* node) {
    if (node == nullptr) return nullptr;
    const auto found = state().graphs.find(node->graph);
    return found == state().graphs.end() ? nullptr : found->second;
}

static int place_of(const Graph& graph, const GraphNode* node) {
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        if (graph.nodes[i].get() == node) return static_cast<int>(i);
    }
    return -1;
}

// The nodes that a node depends on, or those that depend on it.
static int neighbours(CUgraphNode handle, bool before, CUgraphNode* nodes, CUgraphEdgeData* edges,
                      size_t* count) {
    const Lock lock(state().mutex);
    const GraphNode* node = find_node(handle);
    const auto graph = graph_of(node);
    if (!graph || count == nullptr) return kInvalidValue;
    const int place = place_of(*graph, node);
    std::vector<const GraphNode*> found;
    for (std::size_t i = 0; i < graph->nodes.size(); ++i) {
        const GraphNode* other = graph->nodes[i].get();
        const auto& later = before ? node->after : other->after;
        const int earlier = before ? static_cast<int>(i) : place;
        if (std::find(later.begin(), later.end(), earlier) != later.end()) found.push_back(other);
    }
    for (std::size_t i = 0; nodes != nullptr && i < std::min(*count, found.size()); ++i) {
        nodes[i] = reinterpret_cast<CUgraphNode>(const_cast<GraphNode*>(found[i]));
        if (edges != nullptr) edges[i] = {};
    }
    *count = found.size();
    return 0;
}

TRLOW_ENTRY(cuGraphMemsetNodeGetParams);
extern "C" CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle,
                                               CUDA_MEMSET_NODE_PARAMS_v1* out) {
    TRLOW_DRIVER(cuGraphMemsetNodeGetParams);
    const Lock lock(state().mutex);
    const GraphNode* node = find_node(handle);
    if (node == nullptr || out == nullptr || node->work->kind != Kind::fill) {
        return driver_result(kInvalidValue);
    }
    const Work& work = *node->work;
    const auto target = reinterpret_cast<CUdeviceptr>(work.target);
    *out = {target, 0, static_cast<unsigned>(work.value & 0xff), 1, work.nbytes, 1};
    return CUDA_SUCCESS;
}

TRLOW_ENTRY(cuGraphNodeGetDependencies_v2);
extern "C" CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* nodes,
                                                  CUgraphEdgeData* edges, size_t* count) {
    TRLOW_DRIVER(cuGraphNodeGetDependencies_v2);
    return driver_result(neighbours(node, true, nodes, edges, count));
}

TRLOW_ENTRY(cuGraphNodeGetDependentNodes_v2);
extern "C" CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode* nodes,
                                                    CUgraphEdgeData* edges, size_t* count) {
    TRLOW_DRIVER(cuGraphNodeGetDependentNodes_v2);
    return driver_result(neighbours(node, false, nodes, edges, count));
}

// Puts the nodes into the order of `places`; those that are not in it go.
static void reorder(Graph& graph, const std::vector<int>& places) {
    std::vector<int> to(graph.nodes.size(), -1);
    for (std::size_t i = 0; i < places.size(); ++i) {
        to[static_cast<std::size_t>(places[i])] = static_cast<int>(i);
    }
    std::vector<std::unique_ptr<GraphNode>> nodes;
    for (const int place : places) {
        nodes.push_back(std::move(graph.nodes[static_cast<std::size_t>(place)]));
        std::vector<int> after;
        for (const int index : nodes.back()->after) {
            const int moved = to[static_cast<std::size_t>(index)];
            if (moved >= 0) after.push_back(moved);
        }
        nodes.back()->after = std::move(after);
    }
    graph.nodes = std::move(nodes);
}

// Every node behind those it depends on, else as they stand. Empty where there is a cycle.
static std::vector<int> sorted(const Graph& graph) {
    std::vector<std::vector<int>> next(graph.nodes.size());
    std::vector<std::size_t> waits(graph.nodes.size());
    std::set<int> ready;
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        waits[i] = graph.nodes[i]->after.size();
        if (waits[i] == 0) ready.insert(static_cast<int>(i));
        for (const int index : graph.nodes[i]->after) {
            next[static_cast<std::size_t>(index)].push_back(static_cast<int>(i));
        }
    }
    std::vector<int> places;
    while (!ready.empty()) {
        const int place = *ready.begin();
        ready.erase(ready.begin());
        places.push_back(place);
        for (const int index : next[static_cast<std::size_t>(place)]) {
            if (--waits[static_cast<std::size_t>(index)] == 0) ready.insert(index);
        }
    }
    return places.size() == graph.nodes.size() ? places : std::vector<int>();
}

TRLOW_ENTRY(cuGraphAddDependencies_v2);
extern "C" CUresult cuGraphAddDependencies_v2(CUgraph handle, const CUgraphNode* from,
                                              const CUgraphNode* to, const CUgraphEdgeData* edges,
                                              size_t count) {
    TRLOW_DRIVER(cuGraphAddDependencies_v2);
    const Lock lock(state().mutex);
    const auto graph = find(state().graphs, handle);
    if (!graph || ((from == nullptr || to == nullptr) && count > 0)) {
        return driver_result(kInvalidValue);
    }
    if (edges != nullptr) return driver_result(kNotSupported);
    std::vector<std::vector<int>> before;
    for (const auto& node : graph->nodes) before.push_back(node->after);
    bool good = true;
    for (std::size_t i = 0; good && i < count; ++i) {
        GraphNode* node = find_node(to[i]);
        const int first = place_of(*graph, find_node(from[i]));
        good = first >= 0 && place_of(*graph, node) >= 0 &&
               std::find(node->after.begin(), node->after.end(), first) == node->after.end();
        if (good) node->after.push_back(first);
    }
    const std::vector<int> places = good ? sorted(*graph) : std::vector<int>();
    if (good && places.size() == graph->nodes.size()) {
        reorder(*graph, places);
        return CUDA_SUCCESS;
    }
    for (std::size_t i = 0; i < before.size(); ++i) graph->nodes[i]->after = before[i];
    return driver_result(kInvalidValue);
}

TRLOW_ENTRY(cuGraphDestroyNode);
extern "C" CUresult cuGraphDestroyNode(CUgraphNode handle) {
    TRLOW_DRIVER(cuGraphDestroyNode);
    const Lock lock(state().mutex);
    const GraphNode* node = find_node(handle);
    const auto graph = graph_of(node);
    if (!graph) return driver_result(kInvalidValue);
    if (node->work->kind == Kind::child) unregister_graph(*node->work->child);
    const int gone = place_of(*graph, node);
    std::vector<int> places;
    for (std::size_t i = 0; i < graph->nodes.size(); ++i) {
        if (static_cast<int>(i) != gone) places.push_back(static_cast<int>(i));
    }
    reorder(*graph, places);
    return CUDA_SUCCESS;
}
