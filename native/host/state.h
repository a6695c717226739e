// The one State of the process and the functions of the scheduler. It is made on first use and
// never destroyed: at exit, workers and waiting threads may still be in here.
//
// Invariant: State::mutex guards everything; no operation and no callback runs under it.
#pragma once

#include <atomic>
#include <map>
#include <random>
#include <unordered_set>

#include "comm.h"

namespace trlow_host {

// Error codes of three interfaces where they are named in more than one file.
inline constexpr int kInvalidValue = 1;
inline constexpr int kMemoryAllocation = 2;
inline constexpr int kInitializationError = 3;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kIllegalState = 401;
inline constexpr int kNotReady = 600;
inline constexpr int kLaunchTimeout = 702;
inline constexpr int kLaunchFailure = 719;
inline constexpr int kNotPermitted = 800;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kCaptureInvalidated = 901;
inline constexpr int kCaptureMerge = 902;
inline constexpr int kCaptureUnmatched = 903;
inline constexpr int kCaptureUnjoined = 904;
inline constexpr int kCaptureIsolation = 905;
inline constexpr int kCapturedEvent = 907;
inline constexpr int kCaptureWrongThread = 908;

inline constexpr int kNcclInternalError = 3;
inline constexpr int kNcclInvalidArgument = 4;
inline constexpr int kNcclInvalidUsage = 5;
inline constexpr int kNcclRemoteError = 6;

struct Allocation {
    std::size_t nbytes = 0;
    int device = 0;
    bool pinned = false;
    bool shared = false;  // by ncclMemAlloc: other devices can map it, so a window may lie on it
};

struct Device {
    std::size_t used = 0;
    int error = 0;  // sticky: a kernel failed
};

// What belongs to the calling thread.
struct Thread {
    Thread();
    ~Thread();  // a thread that ends is no issuer any more
    unsigned long long id;
    int device = 0;
    int last_error = 0;
    int capture_mode = 0;
    bool issuer = false;
    bool in_callback = false;  // runs a host function, which must not call CUDA
};
Thread& self();

template <class T>
using Table = std::unordered_map<const void*, std::shared_ptr<T>>;

struct State {
    std::mutex mutex;
    // configuration
    int device_count = 4;
    int workers = 0;
    unsigned long long seed = 0;
    std::size_t device_nbytes = std::size_t{16} << 30;
    KernelMode kernel_mode = kSerialKernels;
    std::chrono::milliseconds timeout{30000};
    // what lives
    std::deque<Device> devices = std::deque<Device>(4);
    std::map<std::uintptr_t, Allocation> memory;  // by first byte
    Table<Stream> streams;
    Table<Event> events;
    Table<Graph> graphs;
    Table<Exec> execs;
    Table<Module> modules;
    Table<Function> functions;
    Table<Comm> comms;
    std::set<std::shared_ptr<Capture>> captures;
    std::set<std::shared_ptr<Stream>> draining;  // destroyed, not yet empty
    std::set<std::shared_ptr<Clique>> cliques;
    unsigned streams_made = 0;
    int cliques_made = 0;
    // the scheduler
    std::deque<Task> ready;
    std::vector<Unit*> ended;  // to be settled
    std::condition_variable work;
    std::mt19937_64 random;
    int started = 0, idle = 0, running = 0;
    int in_callbacks = 0;  // of the running ones: workers in a host function
    Clock::time_point last_progress = Clock::now(), last_issue = Clock::now();
    std::vector<Waiter*> waiting;
    int issuers = 0, issuers_waiting = 0;
    // what went wrong last; ncclGetLastError
    std::string report;
};
State& state();

// scheduler.cpp --------------------------------------------------------------------------------
// Appends a unit to a stream that is not capturing and starts it if it is the first.
void enqueue(Stream& stream, std::shared_ptr<const Work> work,
             std::vector<std::shared_ptr<Instance>> instances = {});
// Starts a unit: makes it ready, or lets it wait for an event or for its peers.
void start(Unit& unit);
void push_ready(Task task);
// Lets all that follows from `ended` happen, and wakes workers.
void settle();
void start_workers();
std::string describe(const Work& work);

// wait.cpp -------------------------------------------------------------------------------------
// Block until the work that is in the stream (device, communicator) now has ended: 0, the
// device's sticky error, or kLaunchTimeout with a report when nothing can make it end.
int wait_stream(Lock& lock, const std::shared_ptr<Stream>& stream);
int wait_device(Lock& lock, int device);
int wait_point(Lock& lock, const std::shared_ptr<Point>& point);
int wait_comm(Lock& lock, Comm& comm);
void wake(Waiter& waiter);
void wake_all(std::vector<Waiter*>& waiters);
// Called when a thread begins to wait and when a worker finds nothing to do.
void check_stall();

// capture.cpp ----------------------------------------------------------------------------------
// Enqueues or captures. 0 or the code of the violated rule.
int issue(Stream& stream, std::shared_ptr<const Work> work);
int add_node(Stream& stream, std::shared_ptr<const Work> work);
int begin_capture(const std::shared_ptr<Stream>& stream, int mode);
int finish_capture(Stream& stream, std::shared_ptr<Graph>& graph);
int record_event(Event& event, Stream& stream);
int wait_event(const std::shared_ptr<Stream>& stream, Event& event);
void invalidate(Capture& capture);
void end_capture(Capture& capture);  // every stream leaves it
// 0, or kCaptureUnsupported where CUDA forbids calls that might wait or allocate.
int forbid_unsafe();
// 0, or kCaptureUnsupported because of a capture on `device` that a query or wait breaks.
int forbid_disturbing(int device);

// graph.cpp ------------------------------------------------------------------------------------
std::shared_ptr<Graph> clone(const Graph& graph);
void register_graph(const std::shared_ptr<Graph>& graph);
// Appends a node behind those in `after`, handles of nodes of this graph; 0 or an error.
int add_node(Graph& graph, void* const* after, std::size_t count,
             const std::shared_ptr<const Work>& work, GraphNode** made);
void unregister_graph(const Graph& graph);
std::shared_ptr<const Work> child_work(const Graph& graph);
std::shared_ptr<Exec> instantiate(const Graph& graph);
int launch(Stream& stream, const std::shared_ptr<Exec>& exec);
void begin_run(Unit& unit);
void node_ended(Unit& unit);

// join.cpp -------------------------------------------------------------------------------------
// Joins every call to the next instance of its rank, all or none: 0, or kNcclInvalidUsage with a
// report. The instance of an aborted communicator's call is null: it will end without effect.
int join_all(const std::vector<std::shared_ptr<const Call>>& calls,
             std::vector<std::shared_ptr<Instance>>& instances);
std::size_t side_of(const Instance& instance, const Call& call);
void erase(const Instance& instance);  // from its clique's table
std::string describe(const Signature& signature);
std::string describe(const Instance& instance);

// collective.cpp -------------------------------------------------------------------------------
void arrive(Unit& unit);
void instance_ended(const std::shared_ptr<Instance>& instance);
void abort_pending(Comm& comm);

// capture_ledger.cpp: 0, or kNcclInvalidUsage if another rank captured something else here.
int compare_captured(const Call& call, Capture& capture);
void close_ledgers(Capture& capture, bool failed);

// reduce.cpp: runs without the lock; the sides are complete and nobody changes them.
void reduce(const Instance& instance);
std::size_t dtype_nbytes(int dtype);  // 0: unknown
const char* dtype_name(int dtype);

// memory.cpp -----------------------------------------------------------------------------------
const Allocation* find_memory(const void* address, std::size_t nbytes);
int allocate(int device, bool pinned, std::size_t nbytes, void** pointer, bool shared = false);
int release(Lock& lock, void* pointer, bool pinned, bool shared = false);

// report.cpp -----------------------------------------------------------------------------------
void set_report(const std::string& text);
const char* cuda_error_name(int code);
const char* cuda_error_text(int code);
const char* nccl_error_text(int code);

// ------------------------------------------------------------------------------------------------
template <class T>
std::shared_ptr<T> find(const Table<T>& table, const void* handle) {
    auto found = table.find(handle);
    return found == table.end() ? nullptr : found->second;
}

}  // namespace trlow_host
