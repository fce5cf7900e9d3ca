// Device memory with guards at its ends.
#ifndef JAX_EP_TESTS_CPP_GPU_GUARDED_BUFFER_H_
#define JAX_EP_TESTS_CPP_GPU_GUARDED_BUFFER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/cpp/gpu/require.h"

namespace harness {

// Device memory between guards, all of its bytes 0xff, which is NaN in every type. With `exact`
// there are no guards, for tools that check the bounds of allocations.
class GuardedBuffer {
 public:
  static constexpr size_t kGuard = 256;
  static inline bool exact = false;

  GuardedBuffer() = default;
  GuardedBuffer(const GuardedBuffer&) = delete;
  ~GuardedBuffer() { Free(); }

  // Begins `offset` bytes after a multiple of 256.
  void Reset(size_t bytes, size_t offset = 0) {
    const size_t guard = exact ? 0 : kGuard;
    const size_t total = guard + offset + bytes + guard;
    if (exact || total > capacity_) {
      Free();
      if (total > 0) Require(cudaMalloc(&memory_, total), "cudaMalloc");
      capacity_ = total;
    }
    begin_ = static_cast<uint8_t*>(memory_) + guard + offset;
    bytes_ = bytes;
    if (total > 0) Require(cudaMemset(memory_, 0xff, total), "cudaMemset");
  }

  template <typename T>
  void Set(const std::vector<T>& values) {
    Reset(values.size() * sizeof(T));
    if (values.empty()) return;
    Require(cudaMemcpy(begin_, values.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  std::vector<uint8_t> Bytes() const { return Read(begin_, bytes_); }

  bool GuardsAreIntact() const {
    if (exact) return true;
    uint8_t* const first = static_cast<uint8_t*>(memory_);
    std::vector<uint8_t> guards = Read(first, begin_ - first);
    const std::vector<uint8_t> after = Read(begin_ + bytes_, kGuard);
    guards.insert(guards.end(), after.begin(), after.end());
    return std::all_of(guards.begin(), guards.end(), [](uint8_t byte) { return byte == 0xff; });
  }

  uint8_t* data() const { return begin_; }

  // Returns the memory as elements of T.
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(begin_);
  }

 private:
  static std::vector<uint8_t> Read(const uint8_t* from, size_t bytes) {
    std::vector<uint8_t> values(bytes);
    if (bytes > 0) {
      Require(cudaMemcpy(values.data(), from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    return values;
  }

  void Free() {
    if (memory_ != nullptr) static_cast<void>(cudaFree(memory_));
    memory_ = nullptr;
  }

  void* memory_ = nullptr;
  size_t capacity_ = 0;
  uint8_t* begin_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_GUARDED_BUFFER_H_
