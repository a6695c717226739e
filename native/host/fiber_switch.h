// Leaving one stack for another, in 64-bit x86 code, and telling the sanitizers about it.
// A Stack is one fiber's: mapped memory with a page below it that may not be touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#ifndef __x86_64__
#error "the host device's fibers are written for 64-bit x86"
#endif

// Saves the caller's registers on its stack and that stack's place in *from; goes on at `to`.
extern "C" void trlow_host_switch(void** from, void* to);

namespace trlow_host {

inline constexpr std::size_t kStackNbytes = 256 << 10;

// One side of a switch: a fiber, or the host thread that runs the fibers.
struct Place {
    void* place = nullptr;  // its saved stack pointer
    const void* bottom = nullptr;
    std::size_t nbytes = 0;
    void* shadow = nullptr;  // the address sanitizer's
    void* thread = nullptr;  // the thread sanitizer's
};

class Stack {
  public:
    Stack() {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        void* memory = mmap(nullptr, kStackNbytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, page, PROT_NONE);
        base_ = static_cast<char*>(memory);
        side.bottom = base_;
        side.nbytes = kStackNbytes;
#if defined(__SANITIZE_THREAD__)
        side.thread = __tsan_create_fiber(0);
#endif
    }
    ~Stack() {
#if defined(__SANITIZE_THREAD__)
        __tsan_destroy_fiber(side.thread);
#endif
        munmap(base_, kStackNbytes);
    }
    Stack(const Stack&) = delete;
    Stack& operator=(const Stack&) = delete;

    // The next switch to this stack calls entry(), which must not return. At a function's first
    // instruction the stack pointer is 8 below a multiple of 16.
    void prepare(void (*entry)()) {
        auto* top = reinterpret_cast<std::uintptr_t*>(base_ + kStackNbytes);
        top[-1] = 0;
        top[-2] = reinterpret_cast<std::uintptr_t>(entry);
        for (int i = 3; i <= 8; ++i) top[-i] = 0;  // the six saved registers
        side.place = top - 8;
    }
    Place side;

  private:
    char* base_ = nullptr;
};

// `from_ends`: nothing ever goes back to it.
inline void switch_stack(Place& from, Place& to, [[maybe_unused]] bool from_ends) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.shadow, to.bottom, to.nbytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.thread, 0);
#endif
    trlow_host_switch(&from.place, to.place);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
#endif
}

}  // namespace trlow_host
