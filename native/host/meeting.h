// How ranks come together to make communicators: by unique id, or by splitting one.
//
// Invariant: a meeting forms its communicators exactly once, when its last rank enters. A rank
// that gives up leaves, so that it is not given a communicator nobody asks for.
#pragma once

#include "group.h"

namespace trlow_host {

struct Meeting {
    struct Seat {
        bool taken = false;
        int device = 0, color = 0, key = 0;
        void** out = nullptr;  // where the handle goes
    };
    std::vector<Seat> seats;
    std::size_t entered = 0;
    bool formed = false;
    int error = 0;
    std::condition_variable changed;
};

// The meeting of `name` for `ranks` ranks; null if another size was named before.
std::shared_ptr<Meeting> find_meeting(const std::string& name, int ranks);

}  // namespace trlow_host
