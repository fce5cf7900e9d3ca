// The ranks of one process: devices, streams, control blocks, workspaces, and memory for operands.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_GROUP_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_GROUP_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/kernels/transfer/launch.h"
#include "tests/cpp/gpu/transfer/rails.h"
#include "tests/cpp/gpu/transfer/rank.h"

namespace harness {

class Group {
 public:
  // With `rails`, domains are joined by a network; otherwise each rank reaches all others' memory.
  Group(int num_ranks, bool share_device, size_t workspace_bytes, size_t arena_bytes,
        std::unique_ptr<Rails> rails = nullptr)
      : ranks(num_ranks),
        workspace_bytes_(workspace_bytes),
        arena_bytes_(arena_bytes),
        rails_(std::move(rails)) {
    for (int r = 0; r < num_ranks; ++r) {
      ranks[r].device = share_device ? 0 : r;
      CUDA_OK(cudaSetDevice(ranks[r].device));
      for (int peer = 0; !share_device && peer < num_ranks; ++peer) {
        if (peer == r) continue;
        const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
        if (error != cudaErrorPeerAccessAlreadyEnabled) CUDA_OK(error);
        static_cast<void>(cudaGetLastError());
      }
      STATUS_OK(jax_ep::LoadTransferKernels());
      CUDA_OK(cudaStreamCreateWithFlags(&ranks[r].stream, cudaStreamNonBlocking));
      CUDA_OK(cudaMalloc(&ranks[r].control, sizeof(jax_ep::ControlBlock)));
      CUDA_OK(cudaMemset(ranks[r].control, 0, sizeof(jax_ep::ControlBlock)));
      CUDA_OK(cudaMalloc(&ranks[r].state, sizeof(jax_ep::GenerationState)));
      CUDA_OK(cudaMalloc(&ranks[r].workspace, workspace_bytes));
      CUDA_OK(cudaMemset(ranks[r].workspace, 0x5a, workspace_bytes));
      CUDA_OK(cudaMalloc(&ranks[r].arena, arena_bytes));
      CUDA_OK(cudaHostAlloc(&ranks[r].record, sizeof(jax_ep::AbortRecord),
                            cudaHostAllocMapped | cudaHostAllocPortable));
    }
    NewGeneration();
  }

  ~Group() {
    Synchronize();
    rails_.reset();
    for (Rank& rank : ranks) {
      CUDA_OK(cudaSetDevice(rank.device));
      CUDA_OK(cudaFree(rank.control));
      CUDA_OK(cudaFree(rank.state));
      CUDA_OK(cudaFree(rank.inbox));
      CUDA_OK(cudaFree(rank.workspace));
      CUDA_OK(cudaFree(rank.arena));
      CUDA_OK(cudaFreeHost(rank.record));
      CUDA_OK(cudaStreamDestroy(rank.stream));
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int size() const { return static_cast<int>(ranks.size()); }
  const Rails* rails() const { return rails_.get(); }

  // Starts a generation with new inboxes, as a release and the next call do.
  void NewGeneration() {
    Synchronize();
    ++generation_;
    for (Rank& rank : ranks) {
      CUDA_OK(cudaSetDevice(rank.device));
      if (rank.inbox != nullptr) old_inboxes_.push_back(rank.inbox);
      CUDA_OK(cudaMalloc(&rank.inbox, sizeof(jax_ep::Inbox)));
      CUDA_OK(cudaMemset(rank.inbox, 0, sizeof(jax_ep::Inbox)));
    }
    for (int r = 0; r < size(); ++r) {
      jax_ep::GenerationState state = {};
      state.generation = generation_;
      state.rank = r;
      state.num_ranks = size();
      jax_ep::SetAllPeers(&state);
      state.inbox = ranks[r].inbox;
      state.workspace = ranks[r].workspace;
      state.workspace_bytes = workspace_bytes_;
      state.entry_deadline_ns = entry_deadline_ns;
      state.progress_deadline_ns = progress_deadline_ns;
      state.max_delay_ns = max_delay_ns;
      CUDA_OK(cudaSetDevice(ranks[r].device));
      std::memset(static_cast<void*>(ranks[r].record), 0, sizeof *ranks[r].record);
      CUDA_OK(
          cudaHostGetDevicePointer(reinterpret_cast<void**>(&state.report), ranks[r].record, 0));
      for (int p = 0; p < size(); ++p) state.peers[p] = {ranks[p].inbox, ranks[p].workspace};
      if (rails_) rails_->Prepare(&state);
      CUDA_OK(cudaMemcpy(ranks[r].state, &state, sizeof state, cudaMemcpyHostToDevice));
      STATUS_OK(jax_ep::LaunchStartGeneration(ranks[r].control, ranks[r].state, ranks[r].stream));
    }
    Synchronize();
    if (rails_) rails_->Begin(ranks);
    for (jax_ep::Inbox* inbox : old_inboxes_) CUDA_OK(cudaFree(inbox));
    old_inboxes_.clear();
  }

  void Synchronize() {
    for (Rank& rank : ranks) {
      CUDA_OK(cudaSetDevice(rank.device));
      CUDA_OK(cudaStreamSynchronize(rank.stream));
    }
  }

  // Returns the sequence number of a rank's next call, when no call runs.
  uint64_t NextSequence(int r) {
    const uint64_t claim = Download<uint64_t>(r, &ranks[r].control->claim, 1)[0];
    return jax_ep::FirstSequence(generation_) + (claim >> jax_ep::kClaimShift);
  }

  // Captures what `enqueue(r)` puts into each rank's stream, as a graph that is ready to launch.
  template <typename Enqueue>
  std::vector<cudaGraphExec_t> Capture(const Enqueue& enqueue) {
    std::vector<cudaGraphExec_t> graphs(size());
    for (int r = 0; r < size(); ++r) {
      CUDA_OK(cudaSetDevice(ranks[r].device));
      CUDA_OK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
      enqueue(r);
      cudaGraph_t graph;
      CUDA_OK(cudaStreamEndCapture(ranks[r].stream, &graph));
      CUDA_OK(cudaGraphInstantiate(&graphs[r], graph, 0));
      CUDA_OK(cudaGraphUpload(graphs[r], ranks[r].stream));
      CUDA_OK(cudaGraphDestroy(graph));
    }
    Synchronize();
    return graphs;
  }

  void ResetArenas(int poison) {
    for (Rank& rank : ranks) {
      CUDA_OK(cudaSetDevice(rank.device));
      CUDA_OK(cudaMemsetAsync(rank.arena, poison, rank.used, rank.stream));
      rank.used = 0;
    }
    Synchronize();
  }

  // At least one byte, so that every buffer has its own address.
  template <typename T>
  T* Allocate(int r, size_t count) {
    Rank& rank = ranks[r];
    T* const address = reinterpret_cast<T*>(rank.arena + rank.used);
    rank.used += (count * sizeof(T) + 1 + 255) / 256 * 256;
    if (rank.used > arena_bytes_) {
      std::printf("FAIL the harness's arena of %zu bytes is too small\n", arena_bytes_);
      std::_Exit(1);
    }
    return address;
  }

  template <typename T>
  T* Upload(int r, const std::vector<T>& data) {
    T* const address = Allocate<T>(r, data.size());
    Refill(r, address, data);
    return address;
  }

  template <typename T>
  void Refill(int r, const T* address, const std::vector<T>& data) {
    CUDA_OK(cudaSetDevice(ranks[r].device));
    CUDA_OK(cudaMemcpy(const_cast<T*>(address), data.data(), data.size() * sizeof(T),
                       cudaMemcpyHostToDevice));
    // A copy from pageable memory may return before it has reached the device.
    CUDA_OK(cudaDeviceSynchronize());
  }

  template <typename T>
  std::vector<T> Download(int r, const void* address, size_t count) {
    std::vector<T> data(count);
    CUDA_OK(cudaSetDevice(ranks[r].device));
    CUDA_OK(cudaMemcpy(data.data(), address, count * sizeof(T), cudaMemcpyDeviceToHost));
    return data;
  }

  std::vector<Rank> ranks;
  uint64_t entry_deadline_ns = 20'000'000'000;
  uint64_t progress_deadline_ns = 20'000'000'000;
  uint64_t max_delay_ns = 0;

 private:
  std::vector<jax_ep::Inbox*> old_inboxes_;
  size_t workspace_bytes_;
  size_t arena_bytes_;
  std::unique_ptr<Rails> rails_;
  uint64_t generation_ = 0;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_GROUP_H_
