// See meeting.h.
#include "meeting.h"

#include <algorithm>

namespace trlow_host {

static std::map<std::string, std::weak_ptr<Meeting>>& meetings() {
    static auto* const made = new std::map<std::string, std::weak_ptr<Meeting>>;
    return *made;
}

std::shared_ptr<Meeting> find_meeting(const std::string& name, int ranks) {
    auto& all = meetings();
    for (auto it = all.begin(); it != all.end();) {
        it = it->second.expired() ? all.erase(it) : std::next(it);
    }
    auto meeting = all[name].lock();
    if (!meeting || meeting->formed) {
        meeting = std::make_shared<Meeting>();
        meeting->seats.resize(static_cast<std::size_t>(ranks));
        all[name] = meeting;
    }
    return meeting->seats.size() == static_cast<std::size_t>(ranks) ? meeting : nullptr;
}

static bool same_device_twice(const Meeting& meeting, const std::vector<std::size_t>& ranks) {
    std::set<int> devices;
    for (const std::size_t rank : ranks) devices.insert(meeting.seats[rank].device);
    return devices.size() < ranks.size();
}

// One communicator per color; its ranks by key, then by old rank. A negative color gets none.
static void form(Meeting& meeting) {
    meeting.formed = true;
    std::map<int, std::vector<std::size_t>> colors;
    for (std::size_t rank = 0; rank < meeting.seats.size(); ++rank) {
        if (meeting.seats[rank].color >= 0) colors[meeting.seats[rank].color].push_back(rank);
        *meeting.seats[rank].out = nullptr;
    }
    for (auto& entry : colors) {
        if (same_device_twice(meeting, entry.second)) {
            set_report("two ranks of one communicator stand on the same device");
            meeting.error = kNcclInvalidUsage;
            return;
        }
    }
    for (auto& entry : colors) {
        auto& ranks = entry.second;
        std::stable_sort(ranks.begin(), ranks.end(), [&](std::size_t a, std::size_t b) {
            return meeting.seats[a].key < meeting.seats[b].key;
        });
        std::vector<int> devices;
        for (const std::size_t rank : ranks) devices.push_back(meeting.seats[rank].device);
        const auto clique = make_clique(devices);
        for (std::size_t i = 0; i < ranks.size(); ++i) {
            *meeting.seats[ranks[i]].out = make_comm(clique, static_cast<int>(i)).get();
        }
    }
}

static int give_up(const std::vector<Member>& members) {
    std::string missing;
    for (const Member& member : members) {
        if (member.meeting->formed) continue;
        for (std::size_t rank = 0; rank < member.meeting->seats.size(); ++rank) {
            if (member.meeting->seats[rank].taken) continue;
            missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
        }
        break;
    }
    for (const Member& member : members) {
        if (member.meeting->formed) continue;
        member.meeting->seats[static_cast<std::size_t>(member.rank)].taken = false;
        --member.meeting->entered;
    }
    set_report("no communicator was made: missing ranks " + missing +
               "; every rank must ask for it");
    return kNcclRemoteError;
}

int meet(Lock& lock, const std::vector<Member>& members) {
    const auto deadline = Clock::now() + state().timeout;
    for (const Member& member : members) {
        Meeting& meeting = *member.meeting;
        if (++meeting.entered < meeting.seats.size()) continue;
        form(meeting);
        meeting.changed.notify_all();
    }
    for (const Member& member : members) {
        Meeting& meeting = *member.meeting;
        while (!meeting.formed) {
            if (meeting.changed.wait_until(lock, deadline) == std::cv_status::timeout &&
                !meeting.formed) {
                return give_up(members);
            }
        }
        if (meeting.error != 0) return meeting.error;
    }
    return 0;
}

}  // namespace trlow_host
