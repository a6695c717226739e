// What flows through the device: Work (what is to be done, immutable and shared between a graph
// and its executables), Unit (one execution of it), Task (what a worker takes), Point (one record
// of an event) and Waiter (one blocked host thread).
//
// Invariant: everything here but Work is read and written under State::mutex only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_entry.h"

namespace trlow_host {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Call;      // comm.h: one rank's side of a collective
struct Instance;  // comm.h: the meeting of all ranks' calls
struct Exec;      // objects.h
struct Graph;
struct Launch;
struct Stream;
struct Unit;

// The first eight are cudaGraphNodeType's numbers; the last two exist on this device only.
enum class Kind { kernel, copy, fill, callback, child, empty, wait, record, collective, launch };

struct Waiter {
    std::condition_variable wake;
    std::uint64_t target = 0;  // for a stream: how many of its units must have ended
    bool issuer = false;       // the thread declared that it may issue work
    bool done = false;
    bool stalled = false;  // nothing can make it done; the report says why
    const Stream* on = nullptr;  // the stream whose work it waits for, if known
};

// One cudaEventRecord. An event points to its latest one; waits hold the one they saw.
struct Point {
    bool done = false;
    Clock::time_point when{};
    const Stream* stream = nullptr;  // where it was recorded
    std::vector<Unit*> units;        // waiting in other streams
    std::vector<Waiter*> waiters;
};

struct Work {
    Kind kind = Kind::empty;
    int device = 0;
    // kernel
    const KernelEntry* kernel = nullptr;
    Geometry geometry{};
    std::vector<std::uint64_t> params;
    // copy, fill
    void* target = nullptr;
    const void* source = nullptr;
    std::size_t nbytes = 0;
    int value = 0;
    // callback
    void (*callback)(void*) = nullptr;
    void* argument = nullptr;
    // wait, record
    std::shared_ptr<Point> point;
    // collective: one, or all sends and receives of one group in one stream, which run together
    std::vector<std::shared_ptr<const Call>> calls;
    // child (in a graph), launch (in a stream)
    std::shared_ptr<Graph> child;
    std::shared_ptr<Launch> launch;
};

// Lives in its stream's queue, or in its executable graph (one run at a time).
struct Unit {
    std::shared_ptr<const Work> work;
    std::vector<std::shared_ptr<Instance>> instances;  // of work->calls; null: without effect
    std::size_t left = 0;      // instances it has arrived at that have not ended
    Stream* stream = nullptr;  // where it was enqueued, or
    Exec* exec = nullptr;      // the graph that runs,
    int node = -1;             // and which node it is
    unsigned lane = 0;         // stream number; the seeded order may favour lanes
};

struct Task {
    Unit* unit = nullptr;
    std::shared_ptr<Instance> instance;  // set: reduce this; else run unit->work
    unsigned lane = 0;
};

}  // namespace trlow_host
