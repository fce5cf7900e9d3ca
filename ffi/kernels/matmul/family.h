// A kernel family: the grouped matmuls for an architecture. The launch asks families in order; the
// first that runs on the device and supports a call plans its launches.
#ifndef JAX_EP_KERNELS_MATMUL_FAMILY_H_
#define JAX_EP_KERNELS_MATMUL_FAMILY_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "ffi/kernels/matmul/call.h"
#include "ffi/kernels/matmul/kernel.h"
#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// One launch of a kernel, with its arguments.
class MatmulLaunch {
 public:
  // The kernel computes up to `tiles` tiles on up to `num_sms` SMs.
  template <typename... Arguments>
  MatmulLaunch(const MatmulKernel& kernel, int64_t tiles, int64_t num_sms,
               const Arguments&... arguments)
      : MatmulLaunch(kernel, tiles, num_sms) {
    static_assert((sizeof(Arguments) + ... + 0) + kAlignment * sizeof...(Arguments) <= kBytes);
    static_assert(sizeof...(Arguments) <= kMaxArguments);
    static_assert(
        ((std::is_trivially_copyable_v<Arguments> && alignof(Arguments) <= kAlignment) && ...));
    (Add(&arguments, sizeof arguments), ...);
  }

  Status Launch(cudaStream_t stream) const;

 private:
  static constexpr size_t kAlignment = 128;
  static constexpr size_t kBytes = 2048;
  static constexpr size_t kMaxArguments = 4;

  MatmulLaunch(const MatmulKernel& kernel, int64_t tiles, int64_t num_sms);
  void Add(const void* argument, size_t bytes);

  MatmulKernel kernel_;
  int64_t blocks_;
  std::array<size_t, kMaxArguments> offsets_ = {};
  size_t num_arguments_ = 0;
  size_t bytes_ = 0;
  alignas(kAlignment) std::array<std::byte, kBytes> storage_ = {};
};

// In stream order. None: there is nothing to compute.
using MatmulPlan = std::vector<MatmulLaunch>;

class MatmulFamily {
 public:
  virtual ~MatmulFamily() = default;

  virtual bool RunsOn(ComputeCapability device) const = 0;

  // Returns all kernels, to be loaded on a device.
  virtual std::vector<MatmulKernel> Kernels() const = 0;

  // Returns whether there are kernels for a call. It depends on types, static shapes and alignment
  // only, so that all calls of a program use the same kernel.
  virtual bool Supports(const MatmulCall& call) const = 0;

  // Plans a call that is supported, for the current device. call.num_sms is not 0.
  virtual Status Plan(const MatmulCall& call, MatmulPlan* plan) const = 0;
};

// Returns an upper bound of the tiles: each group, and the tail, has at most one partial tile along
// m. `params` has its out_tile_n.
int64_t MaxTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulParams& params);

// Returns whether b has columns of gate and up.
inline bool HasGate(const MatmulCall& call) {
  return call.kind == MatmulKind::kActivation && call.params.epilogue.activation.is_gated;
}

// Returns the columns of `out` per tile: half of the tile's if there is a gated activation.
inline int32_t OutTileColumns(const MatmulCall& call, const MatmulKernel& kernel) {
  return HasGate(call) ? kernel.tile_n / 2 : kernel.tile_n;
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_FAMILY_H_
