#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"

namespace emulation {

using Work = std::function<void()>;

struct Graph {
  std::vector<Work> works;
};

struct Event {
  std::atomic<int64_t> recorded = 0;  // records so far
  std::atomic<int64_t> reached = 0;   // those that their stream has reached
  std::chrono::steady_clock::time_point time;
};

// A stream: it runs its work in order.
struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> works;
  bool is_busy = false;
  bool is_closed = false;
  Graph* captured = nullptr;
  const int device;
  std::thread thread{[this] { Run(); }};

  explicit Stream(int device) : device(device) {}

  void Add(Work work) {
    if (captured != nullptr) {
      captured->works.push_back(std::move(work));
      return;
    }
    const std::lock_guard lock(mutex);
    works.push_back(std::move(work));
    changed.notify_all();
  }

  void Synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return works.empty() && !is_busy; });
  }

  void Run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return is_closed || !works.empty(); });
      if (works.empty()) return;
      const Work work = std::move(works.front());
      works.pop_front();
      is_busy = true;
      lock.unlock();
      work();
      lock.lock();
      is_busy = false;
      changed.notify_all();
    }
  }
};

Faults faults;

namespace {

constexpr int kDevices = 256;
thread_local int current_device = 0;

std::mutex streams_mutex;
std::set<Stream*> streams;  // on any device

cudaError_t ErrorOf(int device) {
  return device == faults.failed_device ? cudaErrorLaunchFailure : cudaSuccess;
}

std::map<const void*, std::function<Work(void**)>>& Kernels() {
  static std::map<const void*, std::function<Work(void**)>> kernels;
  return kernels;
}

}  // namespace

void Register(const void* address, std::function<Work(void** arguments)> bind_arguments) {
  Kernels()[address] = std::move(bind_arguments);
}

}  // namespace emulation

using emulation::Event;
using emulation::Graph;
using emulation::Stream;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = emulation::kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = emulation::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  emulation::current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = static_cast<int>(emulation::settings.num_sms);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = emulation::settings.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = emulation::settings.shared_bytes;
      return cudaSuccess;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 6144;  // an H200's
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {"no GPU", {{static_cast<char>(device)}}};  // processes share the devices
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error";
}
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int, int) {
  *can_access = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const int device = emulation::current_device;
  if (emulation::ErrorOf(device) != cudaSuccess) return emulation::ErrorOf(device);
  std::vector<Stream*> of_device;
  {
    const std::lock_guard lock(emulation::streams_mutex);
    for (Stream* stream : emulation::streams) {
      if (stream->device == device) of_device.push_back(stream);
    }
  }
  for (Stream* stream : of_device) stream->Synchronize();
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  *address = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  *on_device = on_host;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (emulation::ErrorOf(stream->device) != cudaSuccess) return cudaErrorLaunchFailure;
  stream->Add([=] {
    // A kernel may be reading a word that is copied.
    if (bytes == sizeof(uint32_t)) {
      std::atomic_ref(*static_cast<uint32_t*>(to)).store(*static_cast<const uint32_t*>(from));
    } else if (bytes == sizeof(uint64_t)) {
      std::atomic_ref(*static_cast<uint64_t*>(to)).store(*static_cast<const uint64_t*>(from));
    } else {
      std::memcpy(to, from, bytes);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  stream->Add([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream(emulation::current_device);
  const std::lock_guard lock(emulation::streams_mutex);
  emulation::streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(emulation::streams_mutex);
    emulation::streams.erase(stream);
  }
  {
    const std::lock_guard lock(stream->mutex);
    stream->is_closed = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->Synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(stream->mutex);
  return stream->works.empty() && !stream->is_busy ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->captured = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captured;
  stream->captured = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned) {
  *executable = new Graph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const auto& work : executable->works) stream->Add(work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const int64_t record = ++event->recorded;
  stream->Add([=] {
    event->time = std::chrono::steady_clock::now();
    event->reached = std::max(event->reached.load(), record);
    event->reached.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
static void AwaitRecord(cudaEvent_t event, int64_t record) {
  for (int64_t reached; (reached = event->reached) < record;) event->reached.wait(reached);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  AwaitRecord(event, event->recorded);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  // The last record so far: the event may be recorded anew before the stream is there.
  stream->Add([=, record = event->recorded.load()] { AwaitRecord(event, record); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

// All devices have one such variable.
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  const auto found = emulation::Kernels().find(kernel);
  if (found == emulation::Kernels().end()) return cudaErrorInvalidValue;
  const cudaStream_t stream = config->stream;
  const int device = stream == nullptr ? emulation::current_device : stream->device;
  if (device == emulation::faults.unlaunchable_device) return cudaErrorInvalidValue;
  if (emulation::ErrorOf(device) != cudaSuccess) return cudaSuccess;  // and does not run
  emulation::Grid grid = {config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes,
                          found->second(arguments)};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      grid.cluster_blocks = config->attrs[i].val.clusterDim.x;
    }
  }
  const auto run = [=] { emulation::RunGrid(device, grid); };
  if (stream == nullptr) {  // a call of the default stream ends with its work
    run();
  } else {
    stream->Add(run);
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  const cudaLaunchConfig_t config = {grid, block, shared_bytes, stream, nullptr, 0};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
