// A program of one dispatch, executed by threads as XLA's: one for each device, through a call
// site.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_DISPATCH_PROGRAM_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_DISPATCH_PROGRAM_H_

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/groups/call_site.h"
#include "tests/cpp/emulation/streams.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

struct Lane {
  int64_t lane = 0;
  int64_t num_lanes = 1;
  int64_t num_sms = 2;
};

// Local rank r, counted from the first one, is on device first_device + r. Token t goes to the
// expert t % R, one on each rank. `domain_size` is that of NVLink domains, 0: there is one.
class DispatchProgram {
 public:
  static constexpr int kHidden = 8;
  static inline int rail_slots = 2;  // so few that rings wrap; 0: as many as calls have

  DispatchProgram(int num_ranks, int num_tokens, bool allow_low_latency, int first_device = 0,
                  Lane lane = {}, LocalRanks local = {}, int domain_size = 0)
      : num_ranks_(num_ranks),
        num_tokens_(num_tokens),
        allow_low_latency_(allow_low_latency),
        first_device_(first_device),
        lane_(lane),
        local_(local),
        domain_size_(domain_size),
        ranks_(num_ranks) {
    if (local_.count < 0) local_.count = num_ranks;
    std::vector<int64_t> ids(num_ranks);
    std::iota(ids.begin(), ids.end(), 0);
    site = std::make_shared<CallSite>(std::vector<std::vector<int64_t>>{ids}, lane.lane, kKernels,
                                      local.transport, domain_size);
    const int num_rows = num_ranks * num_tokens;
    for (int r = 0; r < num_ranks; ++r) {
      Rank& rank = ranks_[r];
      rank.x.resize(num_tokens * kHidden);
      rank.ids.resize(num_tokens);
      rank.rows.resize(num_rows * kHidden);
      rank.numbers.resize(16 + 4 * num_rows + num_tokens);
      rank.kept = std::make_unique<bool[]>(num_tokens);
      if (domain_size > 0) {
        rank.token_ranks.resize(num_ranks / domain_size * num_tokens * ((domain_size + 31) / 32));
        rank.index_in_domain.resize(num_rows);
      }
      for (int t = 0; t < num_tokens; ++t) {
        rank.ids[t] = t % num_ranks;
        for (int h = 0; h < kHidden; ++h) rank.x[t * kHidden + h] = X(r, t, h);
      }
    }
  }

  int64_t workspace_bytes() const {
    WorkspaceLayout layout;
    CHECK_OK(PlanWorkspace(Transfer(first_device_).shape, &layout));
    return layout.bytes;
  }

  Status Enter(int64_t run, int r, Status own = {}) {
    const int device = Device(r);
    cudaSetDevice(device);
    return site->Enter(run,
                       {device, Stream(r), r, workspace_bytes(), own, local_.communicator, call});
  }

  Status Launch(int r, cudaStream_t stream = nullptr) {
    const int device = Device(r);
    cudaSetDevice(device);
    PreparedDispatch prepared;
    Status status = PrepareDispatch(Transfer(device), &prepared);
    if (!status.ok()) return status;
    return jax_ep::Launch(prepared, site->control(device), Buffers(r),
                          stream != nullptr ? stream : Stream(r));
  }

  // Enters and launches on all devices of this process.
  std::vector<Status> Run() {
    const int64_t run = NextRun();
    for (int i = 0; i < local_.count; ++i) {
      if (!site->HasRank(first_device_ + i)) site->Announce(run);
    }
    return OnAll([&](int r) {
      Status status = Enter(run, r);
      return status.ok() ? Launch(r) : status;
    });
  }

  template <typename Work>
  std::vector<Status> OnAll(const Work& work) {
    std::vector<Status> statuses(local_.count);
    std::vector<std::jthread> threads;
    for (int i = 0; i < local_.count; ++i) {
      threads.emplace_back([&, i] { statuses[i] = work(local_.first + i); });
    }
    threads.clear();
    return statuses;
  }

  void Synchronize() {
    for (int i = 0; i < local_.count; ++i) cudaStreamSynchronize(Stream(local_.first + i));
  }

  // Forgets the results.
  void Clear() {
    for (Rank& rank : ranks_) {
      std::fill(rank.rows.begin(), rank.rows.end(), -1.0f);
      std::fill(rank.numbers.begin(), rank.numbers.end(), -1);
    }
  }

  // After a Synchronize.
  int status(int r) const { return ranks_[r].numbers[kStatus]; }

  bool IsRight(int r) const {
    const Rank& rank = ranks_[r];
    if (status(r) != 0) return false;
    const float* row = rank.rows.data();
    for (int source = 0; source < num_ranks_; ++source) {
      for (int t = r; t < num_tokens_; t += num_ranks_) {
        for (int h = 0; h < kHidden; ++h) {
          if (*row++ != X(source, t, h)) return false;
        }
      }
    }
    return true;
  }

  bool IsSafe(int r) const {
    for (float number : ranks_[r].rows) {
      if (!std::isnan(number)) return false;
    }
    return status(r) != 0 && ranks_[r].numbers[kGroupSize] == 0;
  }

  // Runs once, and checks the results of all ranks.
  void Check() {
    for (const Status& status : Run()) CHECK_OK(status);
    Synchronize();
    for (int i = 0; i < local_.count; ++i) CHECK(IsRight(local_.first + i));
  }

  static Status Load() { return {}; }
  static constexpr GroupKernels kKernels = {&Load, &LaunchStartGeneration};

  std::shared_ptr<CallSite> site;
  std::string call = "dispatch";  // told to the other processes

 private:
  enum {
    kGroupSize,
    kRealGroupSize,
    kRowOffsets,
    kReceived = 4,
    kDropped,
    kBadIds,
    kStatus,
    kLists
  };
  struct Rank {
    std::vector<float> x, rows;
    std::vector<int32_t> ids, numbers;
    std::unique_ptr<bool[]> kept;
    std::vector<uint32_t> token_ranks;
    std::vector<int32_t> index_in_domain;
  };

  int Device(int r) const { return first_device_ + r - local_.first; }
  cudaStream_t Stream(int r) const { return StreamOf(Device(r), lane_.lane); }

  static float X(int rank, int token, int h) { return rank * 1000 + token + h / 16.0f; }

  TransferCall Transfer(int device) const {
    return {.call_site = site->id(device),
            .shape = {.num_tokens = num_tokens_,
                      .hidden = kHidden,
                      .top_k = 1,
                      .num_experts = num_ranks_,
                      .num_ranks = num_ranks_,
                      .num_rows = num_ranks_ * num_tokens_,
                      .domain_size = domain_size_,
                      .format = kFloat32Rows},
            .num_sms = lane_.num_sms,
            .num_lanes = lane_.num_lanes,
            .allow_low_latency = allow_low_latency_,
            .rail_slots = rail_slots};
  }

  DispatchBuffers Buffers(int r) {
    Rank& rank = ranks_[r];
    const int num_rows = num_ranks_ * num_tokens_;
    int32_t* const lists = rank.numbers.data() + kLists;
    DispatchBuffers buffers;
    buffers.x = rank.x.data();
    buffers.topk_ids = rank.ids.data();
    buffers.rows = rank.rows.data();
    buffers.plan = {.group_sizes = &rank.numbers[kGroupSize],
                    .real_group_sizes = &rank.numbers[kRealGroupSize],
                    .row_offsets = &rank.numbers[kRowOffsets],
                    .row_source = lists,
                    .partial_sum_index = lists + 3 * num_rows,
                    .kept = rank.kept.get(),
                    .destination = lists + 4 * num_rows,
                    .num_received = &rank.numbers[kReceived],
                    .num_dropped = &rank.numbers[kDropped],
                    .num_bad_ids = &rank.numbers[kBadIds],
                    .status = &rank.numbers[kStatus]};
    buffers.forwarding = {rank.token_ranks.data(), rank.index_in_domain.data()};
    return buffers;
  }

  const int num_ranks_;
  const int num_tokens_;
  const bool allow_low_latency_;
  const int first_device_;
  const Lane lane_;
  LocalRanks local_;
  const int domain_size_;
  std::vector<Rank> ranks_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_DISPATCH_PROGRAM_H_
