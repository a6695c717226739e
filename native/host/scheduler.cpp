// The pool of workers and the rules by which one unit of work follows another.
//
// Invariant: a worker never blocks inside a unit. What must wait (for an event, a peer, an earlier
// run of the same graph) is held by what it waits for and costs no thread. Units that end are
// settled in a loop, not by recursion, so a chain of any length needs no stack.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <thread>

#include "fiber.h"
#include "state.h"

namespace trlow_host {

// With a seed, workers hold back until somebody waits or this long after the last issue, so that
// the order is chosen among many units, not among the one that came first.
static constexpr std::chrono::microseconds kGather{300};

void push_ready(Task task) { state().ready.push_back(std::move(task)); }

void start(Unit& unit) {
    State& s = state();
    switch (unit.work->kind) {
        case Kind::empty:
        case Kind::child:
            s.ended.push_back(&unit);
            break;
        case Kind::record: {
            Point& point = *unit.work->point;
            point.done = true;
            point.when = Clock::now();
            for (Unit* waiting : point.units) s.ended.push_back(waiting);
            point.units.clear();
            wake_all(point.waiters);
            s.ended.push_back(&unit);
            break;
        }
        case Kind::wait:
            if (unit.work->point->done) {
                s.ended.push_back(&unit);
            } else {
                unit.work->point->units.push_back(&unit);
            }
            break;
        case Kind::collective:
            arrive(unit);
            break;
        case Kind::launch:
            begin_run(unit);
            break;
        default:
            push_ready({&unit, nullptr, unit.lane});
    }
}

static void stream_unit_ended(Stream& stream) {
    State& s = state();
    const std::shared_ptr<const Work> last = stream.queue.front().work;
    stream.queue.pop_front();
    ++stream.ended;
    auto& waiters = stream.waiters;
    for (std::size_t i = 0; i < waiters.size();) {
        if (waiters[i]->target <= stream.ended) {
            wake(*waiters[i]);
            waiters[i] = waiters.back();
            waiters.pop_back();
        } else {
            ++i;
        }
    }
    if (!stream.queue.empty()) {
        start(stream.queue.front());
    } else if (stream.destroyed) {
        for (auto it = s.draining.begin(); it != s.draining.end(); ++it) {
            if (it->get() == &stream) {
                s.draining.erase(it);
                break;
            }
        }
    }
}

// A worker takes one of the ready tasks itself, so it wakes others for the rest only.
static void settle_and_wake(std::size_t taken) {
    State& s = state();
    if (!s.ended.empty()) s.last_progress = Clock::now();
    while (!s.ended.empty()) {
        Unit* unit = s.ended.back();
        s.ended.pop_back();
        if (unit->exec != nullptr) {
            node_ended(*unit);
        } else {
            stream_unit_ended(*unit->stream);
        }
    }
    const std::size_t others = s.ready.size() - std::min(taken, s.ready.size());
    const std::size_t wanted = std::min(others, static_cast<std::size_t>(s.idle));
    for (std::size_t i = 0; i < wanted; ++i) s.work.notify_one();
}

void settle() { settle_and_wake(0); }

void enqueue(Stream& stream, std::shared_ptr<const Work> work,
             std::vector<std::shared_ptr<Instance>> instances) {
    State& s = state();
    start_workers();
    s.last_issue = s.last_progress = Clock::now();
    Unit unit;
    unit.work = std::move(work);
    unit.instances = std::move(instances);
    unit.stream = &stream;
    unit.lane = stream.number;
    stream.queue.push_back(std::move(unit));
    ++stream.issued;
    if (stream.queue.size() == 1) start(stream.queue.front());
    settle();
}

// Even seeds choose among the ready units alike; odd seeds rank the streams, so that one of them
// is starved as long as any other has work.
static Task take() {
    State& s = state();
    std::size_t chosen = 0;
    if (s.seed != 0 && s.ready.size() > 1) {
        if (s.seed % 2 == 0) {
            chosen = static_cast<std::size_t>(s.random() % s.ready.size());
        } else {
            auto rank = [&](const Task& task) {
                return (task.lane + 1) * (s.seed * 0x9e3779b97f4a7c15ULL | 1) >> 32;
            };
            for (std::size_t i = 1; i < s.ready.size(); ++i) {
                if (rank(s.ready[i]) < rank(s.ready[chosen])) chosen = i;
            }
        }
    }
    Task task = std::move(s.ready[chosen]);
    s.ready.erase(s.ready.begin() + static_cast<std::ptrdiff_t>(chosen));
    return task;
}

// Returns a sticky error code of the device.
static int execute(const Work& work) {
    switch (work.kind) {
        case Kind::kernel: {
            std::vector<std::uint64_t> params = work.params;
            void* pointers[256];
            for (std::size_t i = 0; i < params.size(); ++i) pointers[i] = &params[i];
            work.kernel->run(pointers, work.geometry);
            return fiber_failed() ? kLaunchFailure : 0;
        }
        case Kind::copy:
            std::memmove(work.target, work.source, work.nbytes);
            return 0;
        case Kind::fill:
            std::memset(work.target, work.value, work.nbytes);
            return 0;
        case Kind::callback:
            self().in_callback = true;
            work.callback(work.argument);
            self().in_callback = false;
            return 0;
        default:
            return 0;
    }
}

static void run_task(Lock& lock, const Task& task) {
    State& s = state();
    const bool calls_back = !task.instance && task.unit->work->kind == Kind::callback;
    ++s.running;
    if (calls_back) ++s.in_callbacks;
    lock.unlock();
    int error = 0;
    if (task.instance) {
        reduce(*task.instance);
    } else {
        error = execute(*task.unit->work);
    }
    lock.lock();
    --s.running;
    if (calls_back) --s.in_callbacks;
    if (error != 0) {
        const Work& work = *task.unit->work;
        s.devices[static_cast<std::size_t>(work.device)].error = error;
        set_report(describe(work) + " failed: " + fiber_failure());
    }
    if (task.instance) {
        instance_ended(task.instance);
    } else {
        s.ended.push_back(task.unit);
    }
    settle_and_wake(1);
}

static bool may_take() {
    State& s = state();
    if (s.ready.empty()) return false;
    return s.seed == 0 || !s.waiting.empty() || Clock::now() - s.last_issue > kGather;
}

// Not noexcept and without catch-all: Python ends a thread that comes back from a callback after
// finalisation by unwinding it.
extern "C" {
static void* work_for_ever(void* argument) {
    const int number = static_cast<int>(reinterpret_cast<std::intptr_t>(argument));
    State& s = state();
    std::fesetenv(FE_DFL_ENV);  // a thread inherits the rounding that its maker may have changed
    Lock lock(s.mutex);
    while (number < s.workers) {
        if (may_take()) {
            const Task task = take();
            run_task(lock, task);
            continue;
        }
        if (s.ready.empty()) check_stall();
        ++s.idle;
        if (s.ready.empty()) {
            s.work.wait(lock);
        } else {
            s.work.wait_for(lock, kGather);
        }
        --s.idle;
    }
    --s.started;
    return nullptr;
}
}  // extern "C"

// Detached, with every signal blocked: Ctrl-C belongs to the main thread.
void start_workers() {
    State& s = state();
    if (s.workers == 0) {
        s.workers = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    }
    while (s.started < s.workers) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        void* number = reinterpret_cast<void*>(static_cast<std::intptr_t>(s.started));
        const int error = pthread_create(&thread, nullptr, work_for_ever, number);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error != 0) {
            if (s.started > 0) return;  // fewer workers do the same work
            set_report(std::string("no worker thread could be started: ") + std::strerror(error));
            return;
        }
        pthread_detach(thread);
        ++s.started;
    }
}

std::string describe(const Work& work) {
    switch (work.kind) {
        case Kind::kernel: return std::string("kernel ") + work.kernel->name;
        case Kind::copy: return "copy of " + std::to_string(work.nbytes) + " bytes";
        case Kind::fill: return "memset of " + std::to_string(work.nbytes) + " bytes";
        case Kind::callback: return "host function";
        case Kind::wait: return "wait for an event";
        case Kind::record: return "event record";
        case Kind::launch: return "graph launch";
        case Kind::collective: return "collective";
        default: return "empty node";
    }
}

}  // namespace trlow_host
