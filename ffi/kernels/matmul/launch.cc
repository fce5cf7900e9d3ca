#include "ffi/kernels/matmul/launch.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "ffi/kernels/matmul/kernels.h"
#include "ffi/kernels/matmul/sm90/tensor_maps.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

constexpr MatmulKind kKinds[] = {MatmulKind::kForward, MatmulKind::kForwardTransposed,
                                 MatmulKind::kRhsGradient, MatmulKind::kActivation,
                                 MatmulKind::kActivationGradient};

bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

bool IsCopied(const MatmulOperand& operand) { return operand.is_aligned && !operand.is_float32; }

// Whether a tile has columns of a gate and, beside them, those that it multiplies.
bool HasPairs(MatmulKind kind, const MatmulProblem& problem) {
  return kind == MatmulKind::kActivation && problem.epilogue.activation.is_gated;
}

// What the copy engine asks for, and the instructions: a product of something.
bool TakesTensorMaps(MatmulKind kind, ElementType type, const MatmulProblem& problem) {
  constexpr int64_t kMostColumns = kMaxItems / 2;  // with gates twice as many, in 32 bits
  const GroupRows& rows = problem.rows;
  return type != kF32 && IsCopied(problem.left) && IsCopied(problem.right) &&
         problem.num_n % 8 == 0 && problem.num_n <= kMostColumns && IsAligned(problem.out, 16) &&
         IsAligned(problem.epilogue.pre_activation, 16) &&
         IsAligned(problem.epilogue.gradient, 16) && IsAligned(problem.epilogue.bias, 8) &&
         (kind == MatmulKind::kRhsGradient ? problem.num_m : problem.num_k) > 0 &&
         rows.num_groups > 0 && rows.num_rows > 0;
}

// By static sizes alone, so that all calls of a program have the same.
MatmulKernel ChooseKernel(MatmulKind kind, ElementType type, bool has_wgmma,
                          const MatmulProblem& problem) {
  if (has_wgmma && TakesTensorMaps(kind, type, problem)) {
    return Sm90MatmulKernel(type == kBF16, kind);
  }
  if (kind == MatmulKind::kActivationGradient) return ActivationGradientKernelOf(type);
  if (type == kF32) return Float32MatmulKernel(kind);
  return SixteenBitMatmulKernel(type == kBF16, kind,
                                IsCopied(problem.left) && IsCopied(problem.right));
}

// No group, nor the tail, has more than one tile along m that is not full.
int64_t MostTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulProblem& problem) {
  const int64_t groups = problem.rows.num_groups;
  const int64_t tiles_m = kind == MatmulKind::kRhsGradient
                              ? groups * CeilDivide(problem.num_m, kernel.tile_m)
                              : problem.rows.num_rows / kernel.tile_m + groups + 1;
  return tiles_m * CeilDivide(problem.num_n, problem.tile_n);
}

Status MakeTensorMaps(MatmulKind kind, const MatmulKernel& kernel, ElementType type,
                      ElementType out_type, const MatmulProblem& problem, MatmulTensorMaps* maps) {
  const bool is_gradient = kind == MatmulKind::kRhsGradient;
  const int64_t rows = problem.rows.num_rows;
  const int64_t groups = problem.rows.num_groups;
  const int64_t columns = problem.num_n;
  const int64_t lines = IsTransposed(kind) ? columns : problem.num_k;  // of a group's matrix
  // Copies stop where a group's rows do.
  static_assert(kPrefixRows >= kMaxItems);
  const auto rows_of = [rows](const void* base, ElementType element, int64_t pitch) {
    return MappedTensor::Prefixes(base, element, pitch, pitch, rows);
  };
  const MatmulOperand& left = problem.left;
  const MatmulOperand& right = problem.right;
  Status status =
      MakeTensorMap(rows_of(left.data, type, left.pitch), {kernel.left_lines}, &maps->left);
  if (!status.ok()) return status;
  status =
      MakeTensorMap(is_gradient ? rows_of(right.data, type, right.pitch)
                                : MappedTensor::Stack(right.data, type, right.pitch, lines, groups),
                    {kernel.right_lines, problem.right_blocks}, &maps->right);
  if (!status.ok()) return status;
  status = MakeTensorMap(
      is_gradient ? MappedTensor::Stack(problem.out, out_type, columns, problem.num_m, groups)
                  : rows_of(problem.out, out_type, columns),
      {kSm90LinesOfOut}, &maps->out);
  const void* const kept = problem.epilogue.pre_activation;
  if (!status.ok() || kind != MatmulKind::kActivation || kept == nullptr) return status;
  // A row has the columns of the gate, then those that they multiply.
  const int64_t halves = problem.epilogue.activation.is_gated ? 2 : 1;
  for (int64_t half = 0; status.ok() && half < halves; ++half) {
    const void* const first = static_cast<const char*>(kept) + half * columns * ElementBytes(type);
    status = MakeTensorMap(MappedTensor::Prefixes(first, type, columns, halves * columns, rows),
                           {kSm90LinesOfOut}, &maps->pre_activation[half]);
  }
  return status;
}

}  // namespace

Status CheckMatmulLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  if (num_sms < 0) return InvalidArgument("num_sms is ", num_sms);
  const struct {
    const char* name;
    int64_t value;
  } named[] = {{"L", sizes.num_groups},
               {"M", sizes.num_rows},
               {"K", sizes.contracted},
               {"N", sizes.columns}};
  for (const auto& [name, value] : named) {
    if (value < 0 || value > kMaxItems) {
      return Unimplemented(name, " is ", value, "; the kernels take up to ", kMaxItems);
    }
  }
  const ElementType lhs = sizes.lhs_type;
  if (lhs != kBF16 && lhs != kF16 && lhs != kF32) {
    return Unimplemented("lhs is of another type; the kernels take bf16, f16 and f32");
  }
  return {};
}

Status CheckMatmulType(const char* name, ElementType type, ElementType lhs) {
  if (type == lhs || type == kF32) return {};
  return Unimplemented(name, " is not of lhs's type; the kernels take that or f32");
}

MatmulOperand Operand(const void* data, ElementType type, int64_t pitch) {
  return {.data = data,
          .pitch = pitch,
          .is_float32 = type == kF32,
          .is_aligned = IsAligned(data, 16) && pitch * ElementBytes(type) % 16 == 0};
}

GroupRows Rows(const GroupedMatmulSizes& sizes, const int32_t* group_sizes, bool with_tail) {
  return {.sizes = group_sizes,
          .num_groups = static_cast<int32_t>(sizes.num_groups),
          .num_rows = static_cast<int32_t>(sizes.num_rows),
          .with_tail = with_tail};
}

int32_t NewTileCounter() {
  static std::atomic<int32_t> next = 0;
  const int32_t number = next.fetch_add(1);
  if (number < kNumSm90TileCounters) return number;
  next = kNumSm90TileCounters;
  return -1;
}

Status LaunchMatmul(MatmulKind kind, ElementType type, ElementType out_type, int64_t num_sms,
                    MatmulProblem problem, cudaStream_t stream) {
  bool has_wgmma = false;
  Status status = IsComputeCapability(9, 0, &has_wgmma);
  if (!status.ok()) return status;
  const MatmulKernel kernel = ChooseKernel(kind, type, has_wgmma, problem);
  problem.right_blocks = problem.num_n % kColumnsPerBlock == 0 ? kernel.right_blocks : 1;
  MatmulTensorMaps maps;
  const bool takes_maps = kernel.left_lines > 0;
  if (takes_maps) {
    status = MakeTensorMaps(kind, kernel, type, out_type, problem, &maps);
  } else if (kind == MatmulKind::kActivationGradient) {
    status = LaunchMatmul(MatmulKind::kForwardTransposed, type, out_type, num_sms, problem, stream);
  }
  if (!status.ok()) return status;
  problem.tile_n = HasPairs(kind, problem) ? kernel.tile_n / 2 : kernel.tile_n;
  problem.out_is_float32 = out_type == kF32;
  problem.out_is_aligned = problem.num_n % kernel.stored_elements == 0 &&
                           IsAligned(problem.out, kernel.stored_elements * ElementBytes(out_type));

  int64_t blocks = num_sms;
  if (blocks == 0) {
    status = CountSms(&blocks);
    if (!status.ok()) return status;
  }
  const int64_t tiles = MostTiles(kind, kernel, problem);
  const int64_t most_clusters = std::min<int64_t>(tiles, kMaxItems / kernel.cluster_blocks);
  blocks =
      std::clamp(blocks / kernel.cluster_blocks, int64_t{1}, most_clusters) * kernel.cluster_blocks;
  if (tiles > kMaxItems) problem.tile_counter = -1;  // they count in 32 bits
  void* maps_and_problem[] = {&maps, &problem};
  void* only_problem[] = {&problem};
  void** const arguments = takes_maps ? maps_and_problem : only_problem;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kernel.cluster_blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kernel.cluster_blocks > 1 ? 1 : 0;
  return FromCuda(cudaLaunchKernelExC(&config, kernel.address, arguments), "grouped matmul");
}

Status LoadMatmulKernels() {
  bool has_wgmma = false;
  if (Status status = IsComputeCapability(9, 0, &has_wgmma); !status.ok()) return status;
  std::vector<MatmulKernel> kernels;
  for (ElementType type : {kBF16, kF16, kF32}) {
    kernels.push_back(ActivationGradientKernelOf(type));
  }
  for (MatmulKind kind : kKinds) {
    kernels.push_back(Float32MatmulKernel(kind));
    for (bool is_bfloat16 : {false, true}) {
      for (bool copied : {false, true}) {
        kernels.push_back(SixteenBitMatmulKernel(is_bfloat16, kind, copied));
      }
      if (!has_wgmma) continue;
      kernels.push_back(Sm90MatmulKernel(is_bfloat16, kind));
    }
  }
  for (const MatmulKernel& kernel : kernels) {
    if (kernel.address == nullptr) continue;  // not every one is of every kind
    Status status =
        FromCuda(cudaFuncSetAttribute(kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kernel.shared_bytes),
                 "loading grouped matmul");
    cudaFuncAttributes attributes;  // setting one may load nothing
    if (status.ok()) {
      status =
          FromCuda(cudaFuncGetAttributes(&attributes, kernel.address), "loading grouped matmul");
    }
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_ep
