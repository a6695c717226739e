// Four ranks on four threads: warm up, capture with a coordinator's group, instantiate, replay
// with bounded run-ahead, recover from a missing rank. Linked against the instrumented library.
// Exit code 0 and nothing on stderr: the numbers are right and the sanitizer saw nothing.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "prototypes.h"

namespace {

constexpr int kRanks = 4, kSteps = 200, kCount = 5000;

#define CHECK(call)                                                              \
    do {                                                                         \
        const int code_ = static_cast<int>(call);                                \
        if (code_ != 0) {                                                        \
            std::fprintf(stderr, "%s: %d: %s\n", #call, code_, ncclGetLastError(nullptr)); \
            std::_Exit(1);                                                       \
        }                                                                        \
    } while (0)

class Barrier {
  public:
    explicit Barrier(int count) : count_(count) {}
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int round = round_;
        if (++arrived_ == count_) {
            arrived_ = 0;
            ++round_;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return round_ != round; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int count_, arrived_ = 0, round_ = 0;
};

struct Rank {
    cudaStream_t main = nullptr, side = nullptr;
    cudaEvent_t fork = nullptr, join = nullptr, done[2] = {nullptr, nullptr};
    float *data = nullptr, *scratch = nullptr, *half = nullptr;
    CUmodule module = nullptr;
    CUfunction scale = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
};

Rank ranks[kRanks];
ncclComm_t comms[kRanks];
Barrier all(kRanks + 1);

template <class T>
void allocate(T** pointer, std::size_t count) {
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, count * sizeof(T)));
    *pointer = static_cast<T*>(memory);
}

void launch_scale(const Rank& r, float* data, long long count, unsigned grid, unsigned block,
                  cudaStream_t stream) {
    float* half = r.half;
    void* params[] = {&data, &half, &count};
    CHECK(cuLaunchKernel(r.scale, grid, 1, 1, block, 1, 1, 0, stream, params, nullptr));
}

void prepare(int rank, int mode) {
    Rank& r = ranks[rank];
    CHECK(cudaSetDevice(rank));
    CHECK(cudaStreamCreateWithFlags(&r.main, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&r.side, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&r.fork, &r.join, &r.done[0], &r.done[1]}) {
        CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    allocate(&r.data, kCount);
    allocate(&r.scratch, kCount);
    allocate(&r.half, 1);
    for (int i = 0; i < kCount; ++i) r.data[i] = 1.0f;
    *r.half = 0.25f;
    CHECK(trlowHostKernelMode(mode));
    CHECK(cuModuleLoadData(&r.module, "trlow-host-kernels"));
    CHECK(cuModuleGetFunction(&r.scale, r.module, "scale_f32"));
    launch_scale(r, r.data, 0, 1, 32, r.main);
    CHECK(cudaStreamSynchronize(r.main));
}

void capture(int rank) {
    Rank& r = ranks[rank];
    CHECK(cudaStreamBeginCapture(r.main, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaEventRecord(r.fork, r.main));
    CHECK(cudaStreamWaitEvent(r.side, r.fork, 0));
    CHECK(cudaMemsetAsync(r.scratch, 0, kCount * sizeof(float), r.side));
    all.wait();  // the coordinator issues the group
    all.wait();
    launch_scale(r, r.data, kCount, 2, 64, r.main);
    CHECK(cudaEventRecord(r.join, r.side));
    CHECK(cudaStreamWaitEvent(r.main, r.join, 0));
    CHECK(cudaMemcpyAsync(r.scratch, r.data, kCount * sizeof(float), cudaMemcpyDeviceToDevice,
                          r.main));
    CHECK(cudaStreamEndCapture(r.main, &r.graph));
    all.wait();
    CHECK(cudaGraphInstantiate(&r.exec, r.graph, 0));
    CHECK(cudaGraphUpload(r.exec, r.main));
}

void replay(int rank) {
    Rank& r = ranks[rank];
    for (int step = 0; step < kSteps; ++step) {
        if (step >= 2) CHECK(cudaEventSynchronize(r.done[step % 2]));
        CHECK(cudaGraphLaunch(r.exec, r.main));
        CHECK(cudaEventRecord(r.done[step % 2], r.main));
    }
    CHECK(cudaStreamSynchronize(r.main));
    for (int i = 0; i < kCount; ++i) {  // the mean of equal powers of two is exact
        if (r.data[i] != 1.0f || r.scratch[i] != 1.0f) {
            std::fprintf(stderr, "rank %d: element %d is %g\n", rank, i, r.data[i]);
            std::_Exit(1);
        }
    }
}

void miss_a_rank(int rank) {
    if (rank == 2) return;
    CHECK(trlowHostIssuerEnter());
    CHECK(cudaGraphLaunch(ranks[rank].exec, ranks[rank].main));
    const int code = static_cast<int>(cudaStreamSynchronize(ranks[rank].main));
    if (code != 702) std::_Exit(1);
    CHECK(trlowHostIssuerLeave());
}

void finish(int rank) {
    Rank& r = ranks[rank];
    CHECK(cudaStreamSynchronize(r.main));
    for (cudaEvent_t event : {r.fork, r.join, r.done[0], r.done[1]}) CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(r.main));
    CHECK(cudaStreamDestroy(r.side));
    for (float* memory : {r.data, r.scratch, r.half}) CHECK(cudaFree(memory));
    CHECK(cuModuleUnload(r.module));
}

void run_rank(int rank, int mode) {
    prepare(rank, mode);
    all.wait();
    capture(rank);
    all.wait();
    replay(rank);
    all.wait();
    miss_a_rank(rank);
    all.wait();  // the coordinator aborts and destroys the graphs
    all.wait();
    finish(rank);
}

void recover() {
    std::vector<std::thread> helpers;
    for (ncclComm_t comm : comms) helpers.emplace_back([comm] { CHECK(ncclCommAbort(comm)); });
    for (Rank& rank : ranks) {
        CHECK(cudaGraphExecDestroy(rank.exec));
        CHECK(cudaGraphDestroy(rank.graph));
    }
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace

int main(int count, char** arguments) {
    const int mode = count > 1 ? std::atoi(arguments[1]) : 0;
    const unsigned long long seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    CHECK(trlowHostConfigure(kRanks, 3, seed, 0));
    CHECK(ncclCommInitAll(comms, kRanks, nullptr));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run_rank, rank, mode);
    all.wait();
    all.wait();
    CHECK(ncclGroupStart());
    for (int rank = 0; rank < kRanks; ++rank) {
        Rank& r = ranks[rank];
        CHECK(ncclAllReduce(r.data, r.data, kCount, ncclFloat32, ncclSum, comms[rank], r.main));
    }
    CHECK(ncclGroupEnd());
    for (int i = 0; i < 5; ++i) all.wait();  // issued, ended, instantiated, replayed, missed
    recover();
    all.wait();
    for (std::thread& thread : threads) thread.join();
    for (const char* what : {"streams", "events", "graphs", "execs", "allocations", "comms"}) {
        if (trlowHostLive(what) != 0) {
            std::fprintf(stderr, "%s are left\n", what);
            return 1;
        }
    }
    return 0;
}
