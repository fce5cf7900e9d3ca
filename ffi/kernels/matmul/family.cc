#include "ffi/kernels/matmul/family.h"

#include <algorithm>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

MatmulLaunch::MatmulLaunch(const MatmulKernel& kernel, int64_t tiles, int64_t num_sms)
    : kernel_(kernel) {
  const int64_t max_clusters = std::min<int64_t>(tiles, kMaxItems / kernel.cluster_blocks);
  blocks_ =
      std::clamp(num_sms / kernel.cluster_blocks, int64_t{1}, max_clusters) * kernel.cluster_blocks;
}

void MatmulLaunch::Add(const void* argument, size_t bytes) {
  offsets_[num_arguments_++] = bytes_;
  std::memcpy(storage_.data() + bytes_, argument, bytes);
  bytes_ = CeilDivide(bytes_ + bytes, kAlignment) * kAlignment;
}

Status MatmulLaunch::Launch(cudaStream_t stream) const {
  std::array<void*, kMaxArguments> arguments;
  for (size_t i = 0; i < num_arguments_; ++i) {
    arguments[i] = const_cast<std::byte*>(storage_.data()) + offsets_[i];
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kernel_.cluster_blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks_));
  config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel_.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kernel_.cluster_blocks > 1 ? 1 : 0;
  return FromCuda(cudaLaunchKernelExC(&config, kernel_.address, arguments.data()),
                  "grouped matmul");
}

int64_t MaxTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulParams& params) {
  const int64_t groups = params.groups.num_groups;
  const int64_t tiles_m = kind == MatmulKind::kRhsGradient
                              ? groups * CeilDivide(params.shape_m, kernel.tile_m)
                              : params.groups.num_rows / kernel.tile_m + groups + 1;
  return tiles_m * CeilDivide(params.shape_n, params.out_tile_n);
}

}  // namespace jax_ep
