// See group.h. Issuing of collectives, alone or as a group: all of them or none.
#include "group.h"

#include "entry.h"

namespace trlow_host {

Group& group() {
    thread_local Group mine;
    return mine;
}

int refuse(int code, const std::string& report) {
    set_report(report);
    if (group().depth > 0 && group().error == 0) group().error = code;
    return code;
}

int nccl_injected(int code) {
    if (forked) return static_cast<int>(ncclSystemError);
    if (self().in_callback) return kNcclInvalidUsage;
    if (group().depth > 0 && group().error == 0) group().error = code;
    return code;
}

static void hold(Graph& graph, const std::shared_ptr<Comm>& comm) {
    for (const auto& each : graph.holds) {
        if (each->comm == comm) return;
    }
    graph.holds.push_back(std::make_shared<Hold>(comm));
}

static int check(const Queued& queued) {
    const Comm& comm = *queued.call->comm;
    State& s = state();
    if (comm.aborted || s.comms.count(&comm) == 0) {
        set_report("the communicator of a queued call was destroyed before the group ended");
        return kNcclInvalidArgument;
    }
    if (queued.stream->destroyed) {
        set_report("the stream of a queued call was destroyed before the group ended");
        return kNcclInvalidArgument;
    }
    const int error = s.devices[static_cast<std::size_t>(comm.device)].error;
    const bool broken = queued.stream->capture && !queued.stream->capture->valid;
    if (error == 0 && !broken) return 0;
    if (broken) set_report("rank " + std::to_string(comm.rank) + ": its capture was invalidated");
    return static_cast<int>(ncclUnhandledCudaError);
}

// What is enqueued or recorded as one: a collective, or all transfers of the group in one stream.
struct Bundle {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Work> work;
    std::vector<std::shared_ptr<Instance>> instances;
    bool transfers = false;
};

static std::vector<Bundle> gather(const std::vector<Queued>& queued,
                                  const std::vector<std::shared_ptr<Instance>>& instances) {
    std::vector<Bundle> bundles;
    std::size_t next = 0;
    for (const Queued& each : queued) {
        const Op op = each.call->signature.op;
        const bool transfers = op == Op::send || op == Op::recv;
        auto bundle = bundles.begin();
        while (bundle != bundles.end() &&
               !(transfers && bundle->transfers && bundle->stream == each.stream)) {
            ++bundle;
        }
        if (bundle == bundles.end()) {
            bundle = bundles.insert(bundle, {each.stream, std::make_shared<Work>(), {}, transfers});
            bundle->work->kind = Kind::collective;
            bundle->work->device = each.stream->device;
        }
        bundle->work->calls.push_back(each.call);
        if (!each.stream->capture) bundle->instances.push_back(instances[next++]);
    }
    return bundles;
}

static int issue_all(const std::vector<Queued>& queued) {
    std::vector<std::shared_ptr<const Call>> now;
    for (const Queued& each : queued) {
        const int code = check(each);
        if (code != 0) return code;
    }
    for (const Queued& each : queued) {
        if (!each.stream->capture) {
            now.push_back(each.call);
            continue;
        }
        const int code = compare_captured(*each.call, *each.stream->capture);
        if (code != 0) return code;
    }
    std::vector<std::shared_ptr<Instance>> instances;
    const int code = join_all(now, instances);
    if (code != 0) return code;
    for (auto& each : gather(queued, instances)) {
        if (!each.stream->capture) {
            enqueue(*each.stream, std::move(each.work), std::move(each.instances));
            continue;
        }
        for (const auto& call : each.work->calls) hold(*each.stream->capture->graph, call->comm);
        add_node(*each.stream, std::move(each.work));
    }
    return 0;
}

int issue_call(Queued queued) {
    if (group().depth > 0) {
        group().calls.push_back(std::move(queued));
        return 0;
    }
    return issue_all({std::move(queued)});
}

int join_meeting(Lock& lock, const Member& member) {
    if (group().depth > 0) {
        group().members.push_back(member);
        return 0;
    }
    return meet(lock, {member});
}

static int end(Lock& lock, int injected) {
    Group& mine = group();
    if (mine.depth == 0) {
        if (injected != 0) return injected;
        set_report("ncclGroupEnd without ncclGroupStart");
        return kNcclInvalidUsage;
    }
    if (--mine.depth > 0) {
        if (injected != 0 && mine.error == 0) mine.error = injected;
        return injected;
    }
    Group ended;
    std::swap(ended, mine);
    int code = injected != 0 ? injected : ended.error;
    if (code == 0 && !ended.members.empty()) code = meet(lock, ended.members);
    if (code == 0) code = register_windows(ended.windows);
    if (code == 0) code = issue_all(ended.calls);
    return code;
}

}  // namespace trlow_host

using namespace trlow_host;

TRLOW_ENTRY(ncclGroupStart);
extern "C" ncclResult_t ncclGroupStart(void) {
    TRLOW_NCCL(ncclGroupStart);
    ++group().depth;
    return ncclSuccess;
}

// An end that a test made to fail still ends the group, and launches nothing.
TRLOW_ENTRY(ncclGroupEnd);
extern "C" ncclResult_t ncclGroupEnd(void) {
    const int injected = enter(site_ncclGroupEnd);
    if (forked || self().in_callback) return nccl_result(nccl_injected(injected));
    Lock lock(state().mutex);
    return nccl_result(end(lock, injected));
}
