// NCCL's groups: what a thread issues between ncclGroupStart and ncclGroupEnd.
//
// Invariant: nothing of a group happens before its end, and after any error in it nothing does.
#pragma once

#include "prototypes.h"  // generated from trlow/binding
#include "state.h"

namespace trlow_host {

struct Meeting;

struct Queued {
    std::shared_ptr<const Call> call;
    std::shared_ptr<Stream> stream;
};

// One rank's wish to become a member of a new communicator.
struct Member {
    std::shared_ptr<Meeting> meeting;
    int rank = 0;
};

// One rank's wish for a window.
struct WindowWish {
    std::shared_ptr<Comm> comm;
    void* buffer = nullptr;
    std::size_t nbytes = 0;
    ncclWindow_t* out = nullptr;
    bool symmetric = false;
};

struct Group {
    int depth = 0;
    int error = 0;
    std::vector<Queued> calls;
    std::vector<Member> members;
    std::vector<WindowWish> windows;
};
Group& group();

// Reports an error and, in an open group, poisons it. Needs the lock.
int refuse(int code, const std::string& report);
// Issues now, or queues in the open group. Needs the lock.
int issue_call(Queued queued);
// Enters the meeting now and waits for the other ranks, or queues in the open group.
int join_meeting(Lock& lock, const Member& member);

// nccl_window.cpp: registers all of them or none. Needs the lock.
int register_windows(const std::vector<WindowWish>& wishes);

// meeting.cpp: enters all of `members` and waits until their communicators exist.
int meet(Lock& lock, const std::vector<Member>& members);

// nccl_comm.cpp: the communicator or null.
std::shared_ptr<Comm> find_comm(const void* handle);
std::shared_ptr<Clique> make_clique(const std::vector<int>& devices);
std::shared_ptr<Comm> make_comm(const std::shared_ptr<Clique>& clique, int rank);

}  // namespace trlow_host
