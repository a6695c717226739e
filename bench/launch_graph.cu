// How long does cudaGraphLaunch take in C for a graph of given node types and edges?
//
//   launch_graph TOPOLOGY DEVICES STEPS SPIN_US OUTPUT
//
// TOPOLOGY holds "graphs G", then for each graph "N nodes E edges", N numbers of cudaGraphNodeType
// (a memcpy is followed by its bytes) and E pairs of node numbers. Kernels do nothing, but the first
// of each graph spins SPIN_US, so that a step lasts about as long as the one it stands for. A thread
// per device launches the graphs in turn, waits for the launch two back as trlow's loop does, and
// notes each call's nanoseconds. OUTPUT gets a line per launch: device, nanoseconds.
#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define CHECK(call)                                                            \
  do {                                                                         \
    cudaError_t code = (call);                                                 \
    if (code != cudaSuccess) {                                                 \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code));            \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

struct Node {
  int kind;
  size_t nbytes;
};
struct Topology {
  std::vector<Node> nodes;
  std::vector<std::pair<int, int>> edges;
};

__global__ void kernel(long long spin_ns) {
  if (spin_ns <= 0) return;
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < (unsigned long long)spin_ns);
}

static long long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void refuse(const char *why) {
  fprintf(stderr, "%s\n", why);
  exit(1);
}

static std::vector<Topology> read(const char *path) {
  FILE *file = fopen(path, "r");
  int graphs, nodes, edges;
  if (!file || fscanf(file, " graphs %d", &graphs) != 1) refuse("no topology");
  std::vector<Topology> found(graphs);
  for (Topology &one : found) {
    if (fscanf(file, " %d nodes %d edges", &nodes, &edges) != 2) refuse("bad counts");
    one.nodes.resize(nodes);
    one.edges.resize(edges);
    for (Node &node : one.nodes) {
      node.nbytes = 0;
      if (fscanf(file, "%d", &node.kind) != 1) refuse("bad node");
      if (node.kind == cudaGraphNodeTypeMemcpy && fscanf(file, "%zu", &node.nbytes) != 1)
        refuse("bad memcpy");
    }
    for (auto &edge : one.edges)
      if (fscanf(file, "%d %d", &edge.first, &edge.second) != 2) refuse("bad edge");
  }
  fclose(file);
  return found;
}

static cudaGraphNode_t add(cudaGraph_t graph, const Node &node, long long spin_ns, cudaEvent_t event) {
  cudaGraphNode_t made;
  if (node.kind == cudaGraphNodeTypeKernel) {
    void *arguments[] = {&spin_ns};
    cudaKernelNodeParams params = {};
    params.func = (void *)kernel;
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = arguments;
    CHECK(cudaGraphAddKernelNode(&made, graph, nullptr, 0, &params));
  } else if (node.kind == cudaGraphNodeTypeMemcpy) {
    void *host, *device;
    CHECK(cudaHostAlloc(&host, node.nbytes, 0));
    CHECK(cudaMalloc(&device, node.nbytes));
    CHECK(cudaGraphAddMemcpyNode1D(&made, graph, nullptr, 0, device, host, node.nbytes,
                                   cudaMemcpyHostToDevice));
  } else if (node.kind == cudaGraphNodeTypeMemset) {
    cudaMemsetParams params = {};
    CHECK(cudaMalloc(&params.dst, 4096));
    params.elementSize = 4;
    params.width = 1024;
    params.height = 1;
    CHECK(cudaGraphAddMemsetNode(&made, graph, nullptr, 0, &params));
  } else if (node.kind == cudaGraphNodeTypeEmpty) {
    CHECK(cudaGraphAddEmptyNode(&made, graph, nullptr, 0));
  } else if (node.kind == cudaGraphNodeTypeWaitEvent) {
    CHECK(cudaGraphAddEventWaitNode(&made, graph, nullptr, 0, event));
  } else if (node.kind == cudaGraphNodeTypeEventRecord) {
    CHECK(cudaGraphAddEventRecordNode(&made, graph, nullptr, 0, event));
  } else {
    refuse("a node type that is not known here");
  }
  return made;
}

static cudaGraphExec_t build(const Topology &topology, long long spin_ns, cudaEvent_t event) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  std::vector<cudaGraphNode_t> nodes;
  CHECK(cudaGraphCreate(&graph, 0));
  for (const Node &node : topology.nodes) {
    nodes.push_back(add(graph, node, spin_ns, event));
    if (node.kind == cudaGraphNodeTypeKernel) spin_ns = 0;
  }
  for (const auto &edge : topology.edges) {
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphAddDependencies(graph, &nodes[edge.first], &nodes[edge.second], nullptr, 1));
#else
    CHECK(cudaGraphAddDependencies(graph, &nodes[edge.first], &nodes[edge.second], 1));
#endif
  }
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  return executable;
}

static std::mutex lock;
static std::condition_variable all_ready;
static int missing;

static void launch(const std::vector<Topology> &topologies, int device, int steps, long long spin_ns,
                   std::vector<long long> *took) {
  cudaStream_t stream;
  cudaEvent_t shared, ends[2];
  CHECK(cudaSetDevice(device));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&shared, cudaEventDisableTiming));
  CHECK(cudaEventRecord(shared, stream));
  for (cudaEvent_t &end : ends)
    CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync));
  std::vector<cudaGraphExec_t> graphs;
  for (const Topology &one : topologies) {
    graphs.push_back(build(one, spin_ns, shared));
    CHECK(cudaGraphUpload(graphs.back(), stream));
  }
  CHECK(cudaStreamSynchronize(stream));
  took->reserve(steps);
  {
    std::unique_lock<std::mutex> held(lock);
    if (--missing == 0) all_ready.notify_all();
    all_ready.wait(held, [] { return missing == 0; });
  }
  for (int step = 0; step < steps; step++) {
    if (step >= 2) CHECK(cudaEventSynchronize(ends[step % 2]));
    long long begun = now_ns();
    CHECK(cudaGraphLaunch(graphs[step % graphs.size()], stream));
    took->push_back(now_ns() - begun);
    CHECK(cudaEventRecord(ends[step % 2], stream));
  }
  CHECK(cudaStreamSynchronize(stream));
}

int main(int argc, char **argv) {
  if (argc != 6) refuse("launch_graph TOPOLOGY DEVICES STEPS SPIN_US OUTPUT");
  const std::vector<Topology> topologies = read(argv[1]);
  std::vector<int> devices;
  for (char *text = strtok(argv[2], ","); text; text = strtok(nullptr, ",")) devices.push_back(atoi(text));
  const int steps = atoi(argv[3]);
  const long long spin_ns = (long long)(1e3 * atof(argv[4]));
  std::vector<std::vector<long long>> took(devices.size());
  std::vector<std::thread> threads;
  missing = (int)devices.size();
  for (size_t i = 0; i < devices.size(); i++)
    threads.emplace_back(launch, std::cref(topologies), devices[i], steps, spin_ns, &took[i]);
  for (std::thread &thread : threads) thread.join();
  FILE *output = fopen(argv[5], "w");
  if (!output) refuse("no output");
  for (size_t i = 0; i < devices.size(); i++)
    for (long long ns : took[i]) fprintf(output, "%d %lld\n", devices[i], ns);
  return fclose(output);
}
