// A list of C calls, made one after another. Not of the host device: the functions are those of any
// library. A thread that issues small calls through Python gives the interpreter's lock away and
// takes it back at each of them, and sleeps wherever another thread has it.
#include <chrono>

#include "prototypes.h"

static constexpr int kWords = sizeof(trlowHostCall::words) / sizeof(unsigned long long);

// An integer or a pointer takes a register or a place on the stack of 8 bytes wherever the 64-bit
// ABIs of Linux pass it by itself (System V x86-64, AAPCS64), and a function that takes fewer
// arguments does not look at the rest: one type of function serves all that take nothing else.
template <typename... Words>
static int call(const void* function, Words... words) {
    return reinterpret_cast<int (*)(Words...)>(const_cast<void*>(function))(words...);
}

extern "C" long long trlowHostRun(const trlowHostCall* calls, long long count, int* code) {
    static_assert(kWords == 12, "as many as are passed below");
    for (long long index = 0; index < count; ++index) {
        const unsigned long long* w = calls[index].words;
        *code = call(calls[index].function, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8],
                     w[9], w[10], w[11]);
        if (*code != 0) return index;
    }
    return count;
}

// What a list puts between its calls to know how long they took.
extern "C" trlowHostStatus_t trlowHostClock(long long* nanoseconds) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    return 0;
}
