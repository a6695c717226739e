// Graphs, executable graphs and their runs.
//
// Invariant: a graph's nodes stand in an order in which every node comes after those it depends
// on. An Exec runs once at a time: further launches queue in it, as CUDA serialises them.
#include "state.h"

namespace trlow_host {

Hold::Hold(std::shared_ptr<Comm> held) : comm(std::move(held)) { ++comm->graphs; }
Hold::~Hold() { --comm->graphs; }

// Child graphs are cloned too, so that a clone shares no graph that its original may destroy.
std::shared_ptr<Graph> clone(const Graph& graph) {
    auto copy = std::make_shared<Graph>();
    copy->holds = graph.holds;
    for (const auto& node : graph.nodes) {
        auto made = std::make_unique<GraphNode>();
        made->after = node->after;
        made->lane = node->lane;
        made->graph = copy.get();
        made->work = node->work;
        if (node->work->kind == Kind::child) {
            auto work = std::make_shared<Work>(*node->work);
            work->child = clone(*node->work->child);
            work->child->owned = true;
            made->work = std::move(work);
        }
        copy->nodes.push_back(std::move(made));
    }
    return copy;
}

void register_graph(const std::shared_ptr<Graph>& graph) {
    state().graphs[graph.get()] = graph;
    for (const auto& node : graph->nodes) {
        if (node->work->kind == Kind::child) register_graph(node->work->child);
    }
}

int add_node(Graph& graph, void* const* after, std::size_t count,
             const std::shared_ptr<const Work>& work, GraphNode** made) {
    auto node = std::make_unique<GraphNode>();
    for (std::size_t i = 0; i < count; ++i) {
        const GraphNode* before = find_node(after[i]);
        if (before == nullptr || before->graph != &graph) return kInvalidValue;
        for (std::size_t at = 0; at < graph.nodes.size(); ++at) {
            if (graph.nodes[at].get() == before) node->after.push_back(static_cast<int>(at));
        }
    }
    node->work = work;
    node->graph = &graph;
    *made = node.get();
    graph.nodes.push_back(std::move(node));
    return 0;
}

void unregister_graph(const Graph& graph) {
    for (const auto& node : graph.nodes) {
        if (node->work->kind == Kind::child) unregister_graph(*node->work->child);
    }
    state().graphs.erase(&graph);
}

std::shared_ptr<const Work> child_work(const Graph& graph) {
    auto work = std::make_shared<Work>();
    work->kind = Kind::child;
    work->child = clone(graph);
    work->child->owned = true;
    return work;
}

static void add_edge(Exec& exec, int from, int to) {
    exec.nodes[static_cast<std::size_t>(from)].next.push_back(to);
    ++exec.nodes[static_cast<std::size_t>(to)].waits;
}

static int add_exec_node(Exec& exec, std::shared_ptr<const Work> work, unsigned lane) {
    ExecNode node;
    node.work = std::move(work);
    node.lane = lane;
    if (node.work->kind == Kind::collective) {
        exec.collectives.push_back(static_cast<int>(exec.nodes.size()));
    }
    exec.nodes.push_back(std::move(node));
    return static_cast<int>(exec.nodes.size()) - 1;
}

// Lays `graph` flat behind the nodes `before`. Returns the nodes that end it.
static std::vector<int> flatten(Exec& exec, const Graph& graph, const std::vector<int>& before) {
    // never destroyed: at exit, workers may still run graphs
    static const auto& nothing = *new std::shared_ptr<const Work>(new Work);
    std::vector<int> place(graph.nodes.size());
    std::vector<char> last(graph.nodes.size(), 1);
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
        const GraphNode& node = *graph.nodes[i];
        std::vector<int> after = node.after.empty() ? before : std::vector<int>();
        for (const int index : node.after) {
            last[static_cast<std::size_t>(index)] = 0;
            after.push_back(place[static_cast<std::size_t>(index)]);
        }
        if (node.work->kind == Kind::child) {
            const int begin = add_exec_node(exec, nothing, node.lane);
            for (const int index : after) add_edge(exec, index, begin);
            const std::vector<int> ends = flatten(exec, *node.work->child, {begin});
            place[i] = add_exec_node(exec, nothing, node.lane);
            for (const int index : ends) add_edge(exec, index, place[i]);
        } else {
            place[i] = add_exec_node(exec, node.work, node.lane);
            for (const int index : after) add_edge(exec, index, place[i]);
        }
    }
    std::vector<int> ends;
    for (std::size_t i = 0; i < place.size(); ++i) {
        if (last[i]) ends.push_back(place[i]);
    }
    return ends.empty() ? before : ends;
}

std::shared_ptr<Exec> instantiate(const Graph& graph) {
    auto exec = std::make_shared<Exec>();
    exec->holds = graph.holds;
    flatten(*exec, graph, {});
    exec->units.resize(exec->nodes.size());
    exec->waits.resize(exec->nodes.size());
    for (std::size_t i = 0; i < exec->nodes.size(); ++i) {
        exec->units[i].work = exec->nodes[i].work;
        exec->units[i].exec = exec.get();
        exec->units[i].node = static_cast<int>(i);
        exec->units[i].lane = exec->nodes[i].lane;
        if (exec->nodes[i].waits == 0) exec->roots.push_back(static_cast<int>(i));
    }
    return exec;
}

// CUDA does not capture a launch: a child graph node has to be added by hand.
static int refuse_captured(Stream& stream) {
    invalidate(*stream.capture);
    return kCaptureUnsupported;
}

// Joins the graph's collectives to their instances, in capture order, and enqueues one unit.
int launch(Stream& stream, const std::shared_ptr<Exec>& exec) {
    if (stream.capture) return refuse_captured(stream);
    const int error = state().devices[static_cast<std::size_t>(stream.device)].error;
    if (error != 0) return error;
    auto started = std::make_shared<Launch>();
    started->exec = exec;
    std::vector<std::shared_ptr<const Call>> calls;
    for (const int node : exec->collectives) {
        const auto& each = exec->nodes[static_cast<std::size_t>(node)].work->calls;
        calls.insert(calls.end(), each.begin(), each.end());
    }
    if (join_all(calls, started->instances) != 0) return kInvalidValue;
    auto work = std::make_shared<Work>();
    work->kind = Kind::launch;
    work->device = stream.device;
    work->launch = std::move(started);
    enqueue(stream, std::move(work));
    return 0;
}

static void run(Unit& unit) {
    const Launch& launched = *unit.work->launch;
    Exec& exec = *launched.exec;
    exec.current = &unit;
    exec.left = exec.nodes.size();
    for (std::size_t i = 0; i < exec.nodes.size(); ++i) exec.waits[i] = exec.nodes[i].waits;
    auto next = launched.instances.begin();
    for (const int node : exec.collectives) {
        Unit& collective = exec.units[static_cast<std::size_t>(node)];
        const auto end = next + static_cast<std::ptrdiff_t>(collective.work->calls.size());
        collective.instances.assign(next, end);
        next = end;
    }
    for (const int root : exec.roots) start(exec.units[static_cast<std::size_t>(root)]);
}

void begin_run(Unit& unit) {
    Exec& exec = *unit.work->launch->exec;
    if (exec.nodes.empty()) {
        state().ended.push_back(&unit);
    } else if (exec.current != nullptr) {
        exec.pending.push_back(&unit);
    } else {
        run(unit);
    }
}

void node_ended(Unit& unit) {
    State& s = state();
    Exec& exec = *unit.exec;
    unit.instances.clear();
    for (const int index : exec.nodes[static_cast<std::size_t>(unit.node)].next) {
        const auto next = static_cast<std::size_t>(index);
        if (--exec.waits[next] == 0) start(exec.units[next]);
    }
    if (--exec.left > 0) return;
    s.ended.push_back(exec.current);
    exec.current = nullptr;
    if (exec.pending.empty()) return;
    Unit* following = exec.pending.front();
    exec.pending.pop_front();
    run(*following);
}

}  // namespace trlow_host
