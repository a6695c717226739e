// Counting of calls, failure on request, the calling thread's own state, and fork.
//
// Invariant: the list of sites is complete when the library is loaded and never changes.
#include "entry.h"

#include <pthread.h>

#include <cstring>

namespace trlow_host {

namespace {

Site* sites = nullptr;
std::atomic<long long> all_calls{0};
std::atomic<int> armed{0};
std::atomic<bool> used{false};

struct Failure {
    std::string function;  // "*": any
    long long left = 0;    // calls until it fails
    int code = 0;
};
struct Failures {
    std::mutex mutex;
    std::vector<Failure> list;
};
Failures& failures() {
    static Failures* const made = new Failures;
    return *made;
}

int next_failure(const char* name) {
    Failures& f = failures();
    const std::lock_guard<std::mutex> lock(f.mutex);
    int code = 0;
    for (std::size_t i = 0; i < f.list.size();) {
        Failure& failure = f.list[i];
        const bool meant = failure.function == "*" || failure.function == name;
        if (meant && --failure.left == 0) {
            if (code == 0) code = failure.code;
            f.list.erase(f.list.begin() + static_cast<std::ptrdiff_t>(i));
            --armed;
        } else {
            ++i;
        }
    }
    return code;
}

const bool watching = [] {
    return pthread_atfork(nullptr, nullptr, [] { forked = used.load(); }) == 0;
}();

}  // namespace

std::atomic<bool> forked{false};

Site::Site(const char* function) : name(function), next(sites) { sites = this; }

int enter(Site& site) {
    if (forked.load(std::memory_order_relaxed)) return kInitializationError;
    if (self().in_callback) return kNotPermitted;
    used.store(true, std::memory_order_relaxed);
    site.calls.fetch_add(1, std::memory_order_relaxed);
    all_calls.fetch_add(1, std::memory_order_relaxed);
    if (armed.load(std::memory_order_relaxed) == 0) return 0;
    return next_failure(site.name);
}

static std::atomic<unsigned long long> threads{0};

Thread::Thread() : id(++threads) {}

Thread::~Thread() {
    if (!issuer || forked) return;
    State& s = state();
    const Lock lock(s.mutex);
    --s.issuers;
    check_stall();
}

Thread& self() {
    thread_local Thread thread;
    return thread;
}

State& state() {
    static State* const made = new State;
    return *made;
}

static const Site* find_site(const char* function) {
    for (const Site* site = sites; site != nullptr; site = site->next) {
        if (std::strcmp(site->name, function) == 0) return site;
    }
    return nullptr;
}

}  // namespace trlow_host

using namespace trlow_host;

extern "C" trlowHostStatus_t trlowHostFail(const char* function, long long nth, int code) {
    if (forked) return kInitializationError;
    const bool any = function != nullptr && std::strcmp(function, "*") == 0;
    if (function == nullptr || nth < 0 || (!any && find_site(function) == nullptr)) {
        return kInvalidValue;
    }
    Failures& f = failures();
    const std::lock_guard<std::mutex> lock(f.mutex);
    for (std::size_t i = 0; i < f.list.size();) {
        if ((any && nth == 0) || f.list[i].function == function) {
            f.list.erase(f.list.begin() + static_cast<std::ptrdiff_t>(i));
            --armed;
        } else {
            ++i;
        }
    }
    if (nth > 0) {
        f.list.push_back({function, nth, code});
        ++armed;
    }
    return 0;
}

extern "C" long long trlowHostCalls(const char* function) {
    if (function == nullptr) return -1;
    if (std::strcmp(function, "*") == 0) return all_calls;
    const Site* site = find_site(function);
    return site == nullptr ? -1 : site->calls.load();
}
