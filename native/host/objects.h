// What handles point to: streams, events, captures, graphs, executable graphs, modules.
// Invariant: read and written under State::mutex; a handle is valid while State's table holds it.
#pragma once

#include <set>
#include <unordered_map>
#include <utility>

#include "work.h"

namespace trlow_host {

struct Capture;
struct Clique;
struct Comm;

// While one of these lives, a graph can launch a collective of the communicator.
class Hold {
  public:
    explicit Hold(std::shared_ptr<Comm> comm);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    const std::shared_ptr<Comm> comm;
};

struct Stream {
    int device = 0;
    unsigned number = 0;
    unsigned flags = 0;
    int priority = 0;          // accepted, without effect
    bool destroyed = false;    // lives on until its queue is empty
    std::deque<Unit> queue;    // the front one is started
    std::uint64_t issued = 0, ended = 0;
    std::vector<Waiter*> waiters;
    std::shared_ptr<Capture> capture;
    std::vector<int> tail;     // capturing: nodes that the next one depends on
};

struct Event {
    int device = 0;
    bool timed = true;
    std::shared_ptr<Point> point;      // null: never recorded
    std::shared_ptr<Capture> capture;  // last recorded in this capture, at
    std::vector<int> tail;             // these nodes
};

inline constexpr std::uint64_t kNodeMagic = 0x74726c6f774e4f44;

struct GraphNode {
    std::uint64_t magic = kNodeMagic;
    std::shared_ptr<const Work> work;
    std::vector<int> after;  // indices of the nodes it depends on, all smaller than its own
    unsigned lane = 0;
    const Graph* graph = nullptr;
};

// The node that a handle stands for; null for anything else.
inline GraphNode* find_node(void* handle) {
    auto* node = static_cast<GraphNode*>(handle);
    return node != nullptr && node->magic == kNodeMagic ? node : nullptr;
}

struct Graph {
    bool owned = false;  // the graph inside a child node: its parent destroys it
    std::vector<std::unique_ptr<GraphNode>> nodes;
    std::vector<std::shared_ptr<Hold>> holds;
};

struct Capture {
    unsigned long long thread = 0;  // who began it
    int mode = 0;
    bool valid = true;
    bool open = true;
    Stream* origin = nullptr;
    std::set<Stream*> streams;  // all that joined, the origin too
    std::shared_ptr<Graph> graph;
    std::set<std::shared_ptr<Clique>> cliques;  // whose collectives it holds
};

struct ExecNode {
    std::shared_ptr<const Work> work;
    std::vector<int> next;
    int waits = 0;  // how many nodes it depends on
    unsigned lane = 0;
};

// A graph made ready: child graphs laid flat, one counter per node, one run at a time.
struct Exec {
    std::vector<ExecNode> nodes;
    std::vector<int> roots;
    std::vector<int> collectives;  // nodes, in the order of capture
    std::vector<std::shared_ptr<Hold>> holds;
    // the run
    std::vector<Unit> units;
    std::vector<int> waits;
    std::size_t left = 0;
    Unit* current = nullptr;    // the stream's unit that is running this, or null
    std::deque<Unit*> pending;  // further launches
};

// One cudaGraphLaunch: which meetings its collectives join.
struct Launch {
    std::shared_ptr<Exec> exec;
    std::vector<std::shared_ptr<Instance>> instances;  // in the order of capture
};

struct Module {
    int device = 0;
    KernelMode mode = kSerialKernels;
    std::unordered_map<std::string, std::shared_ptr<struct Function>> functions;
};

struct Function {
    int device = 0;
    const KernelEntry* kernel = nullptr;
};

}  // namespace trlow_host
