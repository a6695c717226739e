// Blocking calls, and the proof that each of them ends: with the work, or with a report. A host
// function may take as long as it likes, as on CUDA, so the time in which one runs is no time
// without progress: who waits for one that never returns waits for ever.
//
// Invariant: State::waiting holds exactly the threads that block and whose wait is not over. A
// thread whose wait is over counts as running, although it may not have woken up yet: it may
// issue more. So "every issuer waits" is never concluded too early.
#include <algorithm>

#include "state.h"

namespace trlow_host {

template <class T>
static void remove(std::vector<T>& from, const T& what) {
    from.erase(std::remove(from.begin(), from.end(), what), from.end());
}

static void leave(Waiter& waiter) {
    State& s = state();
    remove(s.waiting, &waiter);
    if (waiter.issuer) --s.issuers_waiting;
    waiter.wake.notify_one();
}

void wake(Waiter& waiter) {
    if (waiter.done || waiter.stalled) return;
    waiter.done = true;
    leave(waiter);
}

void wake_all(std::vector<Waiter*>& waiters) {
    for (Waiter* waiter : waiters) wake(*waiter);
    waiters.clear();
}

static void stall(Waiter& waiter) {
    waiter.stalled = true;
    leave(waiter);
}

// ---- what is it waiting for --------------------------------------------------------------------

static bool lost_a_rank(const Instance& instance) {
    for (std::size_t i = 0; i < instance.sides.size(); ++i) {
        if (instance.sides[i].gone) return true;
        if (instance.sides[i].call) continue;
        const int rank = instance.sender < 0 ? static_cast<int>(i)
                         : i == 0            ? instance.sender
                                             : instance.receiver;
        if (instance.clique->comms[static_cast<std::size_t>(rank)] == nullptr) return true;
    }
    return false;
}

// A collective that the unit has arrived at and that can never end.
static const Instance* lost(const Unit& unit) {
    for (const auto& instance : unit.instances) {
        if (!instance || instance->running || !lost_a_rank(*instance)) continue;
        for (const Side& side : instance->sides) {
            if (side.unit == &unit) return instance.get();
        }
    }
    return nullptr;
}

// The lost collective that holds the stream back, directly or through events.
static const Instance* lost_on(const Stream* stream, int depth) {
    if (stream == nullptr || depth == 0 || stream->queue.empty()) return nullptr;
    const Unit& unit = stream->queue.front();
    if (unit.work->kind == Kind::collective) return lost(unit);
    if (unit.work->kind == Kind::wait) return lost_on(unit.work->point->stream, depth - 1);
    if (unit.work->kind != Kind::launch) return nullptr;
    const Exec& exec = *unit.work->launch->exec;
    for (const int node : exec.collectives) {
        const Instance* found = lost(exec.units[static_cast<std::size_t>(node)]);
        if (found != nullptr) return found;
    }
    return nullptr;
}

static std::string describe_pending() {
    State& s = state();
    std::string text;
    for (const auto& clique : s.cliques) {
        auto add = [&](const Instance& instance) {
            clique->stalled = true;
            text += text.empty() ? "" : "; ";
            text += describe(instance);
        };
        for (const auto& entry : clique->collectives) {
            add(*entry.second);
            break;  // later ones wait behind the first
        }
        for (const auto& entry : clique->transfers) add(*entry.second);
    }
    if (!text.empty()) return text;
    for (const auto& entry : s.streams) {
        const Stream& stream = *entry.second;
        if (stream.queue.empty()) continue;
        text += text.empty() ? "" : "; ";
        text += "stream " + std::to_string(stream.number) + " of device " +
                std::to_string(stream.device) + " is at a " +
                describe(*stream.queue.front().work);
    }
    return text.empty() ? "nothing is enqueued" : text;
}

static void stall_everybody(const std::string& why) {
    set_report(why + ": " + describe_pending());
    const std::vector<Waiter*> waiting = state().waiting;
    for (Waiter* waiter : waiting) stall(*waiter);
}

// Reports at once where it is certain that nothing can go on.
void check_stall() {
    State& s = state();
    if (s.waiting.empty() || s.running > 0 || !s.ready.empty()) return;
    if (s.issuers > 0 && s.issuers_waiting == s.issuers) {
        stall_everybody("missing rank: every thread that issues work waits, nothing runs");
        return;
    }
    const std::vector<Waiter*> waiting = s.waiting;
    for (Waiter* waiter : waiting) {
        const Instance* instance = lost_on(waiter->on, 64);
        if (instance == nullptr) continue;
        instance->clique->stalled = true;
        set_report("missing rank: its communicator is gone: " + describe(*instance));
        stall(*waiter);
    }
}

static void check_progress() {
    State& s = state();
    if (s.in_callbacks > 0) s.last_progress = Clock::now();
    if (s.waiting.empty() || Clock::now() - s.last_progress < s.timeout) return;
    const double seconds = static_cast<double>(s.timeout.count()) / 1000.0;
    std::string text = std::to_string(seconds);
    text.resize(text.find('.') + 2);
    stall_everybody("no progress for " + text + " s (" + std::to_string(s.running) +
                    " operations run, " + std::to_string(s.ready.size()) + " are ready)");
}

// Blocks until `waiter`, which the caller put into a list, is done or stalled.
static int block(Lock& lock, Waiter& waiter, std::vector<Waiter*>& list) {
    State& s = state();
    list.push_back(&waiter);
    s.waiting.push_back(&waiter);
    waiter.issuer = self().issuer;
    if (waiter.issuer) ++s.issuers_waiting;
    if (s.seed != 0) s.work.notify_all();
    // Time that passed before anybody waited is not time without progress.
    if (s.waiting.size() == 1) s.last_progress = Clock::now();
    check_stall();
    while (!waiter.done && !waiter.stalled) {
        waiter.wake.wait_until(lock, s.last_progress + s.timeout);
        if (!waiter.done && !waiter.stalled) check_progress();
    }
    if (waiter.done) return 0;
    remove(list, &waiter);
    return kLaunchTimeout;
}

static int wait_until_ended(Lock& lock, Stream& stream, std::uint64_t target) {
    if (stream.ended >= target) return 0;
    Waiter waiter;
    waiter.target = target;
    waiter.on = &stream;
    return block(lock, waiter, stream.waiters);
}

static int sticky(int device) {
    return state().devices[static_cast<std::size_t>(device)].error;
}

int wait_stream(Lock& lock, const std::shared_ptr<Stream>& stream) {
    const std::shared_ptr<Stream> held = stream;
    const int code = wait_until_ended(lock, *held, held->issued);
    return code != 0 ? code : sticky(held->device);
}

int wait_device(Lock& lock, int device) {
    State& s = state();
    std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> targets;
    for (const auto& entry : s.streams) {
        if (entry.second->device == device) {
            targets.emplace_back(entry.second, entry.second->issued);
        }
    }
    for (const auto& stream : s.draining) {
        if (stream->device == device) targets.emplace_back(stream, stream->issued);
    }
    for (const auto& entry : targets) {
        const int code = wait_until_ended(lock, *entry.first, entry.second);
        if (code != 0) return code;
    }
    return sticky(device);
}

int wait_point(Lock& lock, const std::shared_ptr<Point>& point) {
    const std::shared_ptr<Point> held = point;
    if (held->done) return 0;
    Waiter waiter;
    waiter.on = held->stream;
    return block(lock, waiter, held->waiters);
}

int wait_comm(Lock& lock, Comm& comm) {
    if (comm.pending == 0) return 0;
    Waiter waiter;
    return block(lock, waiter, comm.waiters);
}

}  // namespace trlow_host
