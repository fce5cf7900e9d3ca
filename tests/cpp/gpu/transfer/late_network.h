// A network of one process, for tests: puts of addresses that the process has itself land late, and
// in any order; a flag lands after its bytes, and bytes of other puts in between.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_LATE_NETWORK_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_LATE_NETWORK_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ffi/runtime/network/network.h"

namespace harness {

class LateNetwork : public jax_ep::Network {
 public:
  explicit LateNetwork(uint64_t seed) : random_(seed) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaHostAlloc(&values_, kMaxPuts * sizeof(uint64_t), cudaHostAllocPortable));
    for (int i = kMaxPuts; i > 0; --i) free_values_.push_back(values_ + i - 1);
  }
  ~LateNetwork() override {
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
    static_cast<void>(cudaFreeHost(values_));
  }

  // There is nothing to register, and nobody to connect to.
  jax_ep::Status Register(void* /*address*/, size_t /*bytes*/, std::string* /*key*/) override {
    return {};
  }
  jax_ep::Status Unregister(void* /*address*/) override { return {}; }
  jax_ep::Status Address(std::string* /*address*/) override { return {}; }
  jax_ep::Status Connect(const std::string& /*address*/, int* /*connection*/) override {
    return {};
  }
  jax_ep::Status Open(int /*connection*/, const std::string& /*key*/, int* /*memory*/) override {
    return {};
  }
  void Close(int /*memory*/) override {}

  jax_ep::Status Start(const jax_ep::Put& put) override {
    if (free_values_.empty()) return jax_ep::FailedPrecondition("too many puts at once");
    uint64_t* const value = free_values_.back();
    free_values_.pop_back();
    ++num_puts_;
    *value = put.value;
    pending_.push_back({put, value, put.bytes > 0, false});
    return {};
  }

  jax_ep::Status Progress() override {
    if (cudaStreamQuery(stream_) == cudaErrorNotReady) return {};
    std::erase_if(pending_, [&](const Pending& put) {
      if (put.has_landed) free_values_.push_back(put.value);
      return put.has_landed;
    });
    // Some go on, in a random order. Now and then most of them wait.
    const uint32_t odds = random_() % 8 == 0 ? 16 : 2;
    std::shuffle(pending_.begin(), pending_.end(), random_);
    for (Pending& next : pending_) {
      if (random_() % odds != 0) continue;
      const jax_ep::Put& put = next.put;
      if (next.has_bytes) {
        Check(cudaMemcpyAsync(reinterpret_cast<void*>(put.to), put.from, put.bytes,
                              cudaMemcpyDefault, stream_));
        next.has_bytes = false;
        continue;
      }
      Check(cudaMemcpyAsync(reinterpret_cast<void*>(put.flag), next.value, sizeof(uint64_t),
                            cudaMemcpyDefault, stream_));
      next.has_landed = true;
    }
    return status_;
  }
  bool IsIdle() const override { return pending_.empty(); }
  std::string Describe(int /*connection*/) const override { return "a late network"; }

  uint64_t num_puts() const { return num_puts_; }

 private:
  static constexpr int kMaxPuts = 1 << 16;
  struct Pending {
    jax_ep::Put put;
    uint64_t* value;
    bool has_bytes;   // they are not under way
    bool has_landed;  // or will have when the stream is idle
  };

  void Check(cudaError_t error) {
    if (error != cudaSuccess) status_ = jax_ep::FailedPrecondition(cudaGetErrorString(error));
  }

  std::mt19937_64 random_;
  std::atomic<uint64_t> num_puts_ = 0;
  jax_ep::Status status_;
  cudaStream_t stream_ = nullptr;
  uint64_t* values_ = nullptr;
  std::vector<uint64_t*> free_values_;
  std::vector<Pending> pending_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_LATE_NETWORK_H_
