// Fibers: the threads of a block, each with a stack of its own, switched by hand at barriers.
//
// Invariant: a barrier releases when every thread of the block has reached it. A thread that has
// ended can never reach it, so then the run ends and says so. Threads that meet no barrier run to
// their end one after another on the same stack.
#include "fiber.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fiber_switch.h"
#include "kernel_entry.h"

asm(R"(
.text
.globl trlow_host_switch
.hidden trlow_host_switch
.type trlow_host_switch, @function
trlow_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size trlow_host_switch, .-trlow_host_switch
)");

namespace trlow_host {

namespace {

constexpr int kCanary = 0xCB;

struct Fiber {
    FiberPlace place{};
    std::unique_ptr<Stack> stack;  // null before it starts and after it ends
    bool ended = false;
};

struct Shared {
    const void* key;
    std::size_t nbytes;
    std::unique_ptr<char[]> memory;
    char* aligned;
};

// Everything of one host thread's fibers. Stacks are kept for the next block.
struct Runner {
    std::vector<Fiber> fibers;
    std::vector<std::unique_ptr<Stack>> free;
    std::vector<Shared> shared;
    std::vector<std::size_t> order;
    Fiber* current = nullptr;
    Place main;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    bool failed = false;
    std::string failure;
};

thread_local Runner runner;

// What a fiber starts with: ends by switching away for ever.
void fiber_entry() {
    Runner& r = runner;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &r.main.bottom, &r.main.nbytes);
#endif
    r.body(r.argument);
    r.current->ended = true;
    switch_stack(r.current->stack->side, r.main, true);
}

void resume(Runner& r, Fiber& fiber) {
    r.current = &fiber;
    if (!fiber.stack) {
        if (r.free.empty()) {
            fiber.stack = std::make_unique<Stack>();
        } else {
            fiber.stack = std::move(r.free.back());
            r.free.pop_back();
        }
        fiber.stack->prepare(fiber_entry);
    }
    switch_stack(r.main, fiber.stack->side, false);
    if (fiber.ended) r.free.push_back(std::move(fiber.stack));
    r.current = nullptr;
}

std::string name_of(const FiberPlace& place) {
    return "thread " + std::to_string(place.thread[0]) + " of block " +
           std::to_string(place.block[0]);
}

void fail(Runner& r) {
    const Fiber *waits = nullptr, *ended = nullptr;
    std::size_t waiting = 0;
    for (const Fiber& fiber : r.fibers) {
        if (fiber.ended) {
            ended = &fiber;
        } else {
            waits = &fiber;
            ++waiting;
        }
    }
    r.failed = true;
    r.failure = std::to_string(waiting) + " of " + std::to_string(r.fibers.size()) +
                " threads wait at a barrier that the others never reach: " +
                name_of(waits->place) + " waits, " + name_of(ended->place) + " has ended";
    for (Fiber& fiber : r.fibers) {
        if (fiber.stack) r.free.push_back(std::move(fiber.stack));
    }
}

void run_block(Runner& r) {
    for (Shared& shared : r.shared) std::memset(shared.aligned, kCanary, shared.nbytes);
    std::size_t left = r.fibers.size();
    while (left > 0) {
        for (const std::size_t index : r.order) {
            Fiber& fiber = r.fibers[index];
            resume(r, fiber);
            if (fiber.ended) --left;
        }
        if (left > 0 && left < r.fibers.size()) {
            fail(r);
            return;
        }
    }
}

void place_threads(Runner& r, const Geometry& g, const unsigned* block) {
    std::size_t index = 0;
    for (unsigned z = 0; z < g.block[2]; ++z) {
        for (unsigned y = 0; y < g.block[1]; ++y) {
            for (unsigned x = 0; x < g.block[0]; ++x) {
                Fiber& fiber = r.fibers[index++];
                fiber.ended = false;
                fiber.place = {{block[0], block[1], block[2]},
                               {x, y, z},
                               {g.grid[0], g.grid[1], g.grid[2]},
                               {g.block[0], g.block[1], g.block[2]}};
            }
        }
    }
}

}  // namespace

void fiber_run(const Geometry& g, void (*body)(void* argument), void* argument) {
    Runner& r = runner;
    r.failed = false;
    r.body = body;
    r.argument = argument;
#if defined(__SANITIZE_THREAD__)
    r.main.thread = __tsan_get_current_fiber();
#endif
    r.fibers.clear();
    r.fibers.resize(std::size_t{g.block[0]} * g.block[1] * g.block[2]);
    r.order.resize(r.fibers.size());
    std::iota(r.order.begin(), r.order.end(), std::size_t{0});
    std::mt19937_64 random(g.seed);
    for (unsigned z = 0; z < g.grid[2]; ++z) {
        for (unsigned y = 0; y < g.grid[1]; ++y) {
            for (unsigned x = 0; x < g.grid[0]; ++x) {
                if (g.seed != 0) std::shuffle(r.order.begin(), r.order.end(), random);
                const unsigned block[3] = {x, y, z};
                place_threads(r, g, block);
                run_block(r);
                if (r.failed) return;
            }
        }
    }
}

const FiberPlace& fiber_place() { return runner.current->place; }

void fiber_barrier() {
    Runner& r = runner;
    switch_stack(r.current->stack->side, r.main, false);
}

void* fiber_shared(const void* key, std::size_t nbytes) {
    for (const Shared& shared : runner.shared) {
        if (shared.key == key && shared.nbytes >= nbytes) return shared.aligned;
    }
    Shared made{key, nbytes, std::make_unique<char[]>(nbytes + 64), nullptr};
    auto address = reinterpret_cast<std::uintptr_t>(made.memory.get());
    made.aligned = made.memory.get() + (64 - address % 64) % 64;
    std::memset(made.aligned, kCanary, nbytes);
    runner.shared.push_back(std::move(made));
    return runner.shared.back().aligned;
}

bool fiber_failed() {
    const bool failed = runner.failed;
    runner.failed = false;
    return failed;
}

const std::string& fiber_failure() { return runner.failure; }

}  // namespace trlow_host
