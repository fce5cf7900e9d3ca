#include "ffi/kernels/grouped_matmul.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "ffi/kernels/grouped_matmul_kernels.h"
#include "ffi/kernels/tensor_maps.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

constexpr MatmulKind kKinds[] = {MatmulKind::kForward, MatmulKind::kForwardTransposed,
                                 MatmulKind::kGradient};

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
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

bool IsCopied(const MatmulOperand& operand) { return operand.is_aligned && !operand.is_float32; }

MatmulKernel PortableKernel(MatmulKind kind, ElementType type, const MatmulProblem& problem) {
  if (type == kF32) return Float32MatmulKernel(kind);
  return SixteenBitMatmulKernel(type == kBF16, kind,
                                IsCopied(problem.left) && IsCopied(problem.right));
}

// Whether sm_90's kernel takes the problem and is the faster. With a few rows a group the time goes
// into reading the matrices, which the portable kernel does at the memory's rate; sm_90's tile has
// 64 rows at the least.
bool IsForSm90(MatmulKind kind, ElementType type, const MatmulProblem& problem) {
  constexpr int64_t kFewRows = 32;
  const GroupRows& rows = problem.rows;
  return type != kF32 && IsCopied(problem.left) && IsCopied(problem.right) &&
         problem.num_n % 8 == 0 && IsAligned(problem.out, 16) &&
         (kind == MatmulKind::kGradient ? problem.num_m : problem.num_k) > 0 &&
         rows.num_groups > 0 && rows.num_rows > kFewRows * rows.num_groups;
}

// No group, nor the tail, has more than one tile along m that is not full.
int64_t MostTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulProblem& problem) {
  const int64_t groups = problem.rows.num_groups;
  const int64_t tiles_m = kind == MatmulKind::kGradient
                              ? groups * CeilDivide(problem.num_m, kernel.tile_m)
                              : problem.rows.num_rows / kernel.tile_m + groups + 1;
  return tiles_m * CeilDivide(problem.num_n, kernel.tile_n);
}

struct TensorMaps {
  CUtensorMap left, right, out;
};

Status MakeTensorMaps(MatmulKind kind, ElementType type, ElementType out_type,
                      const MatmulProblem& problem, TensorMaps* maps) {
  const bool is_gradient = kind == MatmulKind::kGradient;
  const int64_t rows = problem.rows.num_rows;
  const int64_t groups = problem.rows.num_groups;
  Status status = MakeTensorMap(problem.left.data, type, problem.left.pitch, rows, 1,
                                Sm90LinesOfLeft(kind), &maps->left);
  if (!status.ok()) return status;
  const int64_t lines = is_gradient                    ? rows
                        : kind == MatmulKind::kForward ? problem.num_k
                                                       : problem.num_n;
  status = MakeTensorMap(problem.right.data, type, problem.right.pitch, lines,
                         is_gradient ? 1 : groups, Sm90LinesOfRight(kind), &maps->right);
  if (!status.ok()) return status;
  return MakeTensorMap(problem.out, out_type, problem.num_n, is_gradient ? problem.num_m : rows,
                       is_gradient ? groups : 1, kSm90LinesOfOut, &maps->out);
}

// What depends on the kernel is still to be set in `problem`.
Status Launch(const GroupedMatmulConfig& config, MatmulKind kind, ElementType type,
              ElementType out_type, MatmulProblem problem, cudaStream_t stream) {
  TensorMaps maps;
  bool is_sm90 = false;
  Status status;
  if (IsForSm90(kind, type, problem)) status = IsComputeCapability(9, 0, &is_sm90);
  if (status.ok() && is_sm90) status = MakeTensorMaps(kind, type, out_type, problem, &maps);
  if (!status.ok()) return status;
  const MatmulKernel kernel =
      is_sm90 ? Sm90MatmulKernel(type == kBF16, kind) : PortableKernel(kind, type, problem);
  problem.out_is_float32 = out_type == kF32;
  problem.out_is_aligned = problem.num_n % kernel.stored_elements == 0 &&
                           IsAligned(problem.out, kernel.stored_elements * ElementBytes(out_type));

  int64_t blocks = config.num_sms;
  if (blocks == 0) {
    status = CountMultiprocessors(&blocks);
    if (!status.ok()) return status;
  }
  const int64_t tiles = MostTiles(kind, kernel, problem);
  blocks = std::min({blocks, tiles, kMaxMatmulSize});
  if (tiles > kMaxMatmulSize) problem.tile_counter = -1;  // they count in 32 bits
  void* maps_and_problem[] = {&maps.left, &maps.right, &maps.out, &problem};
  void* only_problem[] = {&problem};
  void** const arguments = is_sm90 ? maps_and_problem : only_problem;
  return FromCuda(cudaLaunchKernel(kernel.address, dim3(static_cast<unsigned>(blocks)),
                                   dim3(static_cast<unsigned>(kernel.threads)), arguments,
                                   static_cast<size_t>(kernel.shared_bytes), stream),
                  "grouped matmul");
}

Status Check(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes) {
  if (config.num_sms < 0) return InvalidArgument("num_sms is ", config.num_sms);
  const struct {
    const char* name;
    int64_t value;
  } named[] = {{"L", sizes.num_groups},
               {"M", sizes.num_rows},
               {"K", sizes.contracted},
               {"N", sizes.columns}};
  for (const auto& [name, value] : named) {
    if (value < 0 || value > kMaxMatmulSize) {
      return Unimplemented(name, " is ", value, "; the kernels take up to ", kMaxMatmulSize);
    }
  }
  const ElementType lhs = sizes.lhs_type;
  if (lhs != kBF16 && lhs != kF16 && lhs != kF32) {
    return Unimplemented("lhs is of another type; the kernels take bf16, f16 and f32");
  }
  return {};
}

// A type that an operand or a result may have besides float32.
Status CheckType(const char* name, ElementType type, ElementType lhs) {
  if (type == lhs || type == kF32) return {};
  return Unimplemented(name, " is not of lhs's type; the kernels take that or f32");
}

}  // namespace

Status CheckGroupedMatmulLaunch(const GroupedMatmulConfig& config,
                                const GroupedMatmulSizes& sizes) {
  Status status = Check(config, sizes);
  if (status.ok()) status = CheckType("rhs", sizes.rhs_type, sizes.lhs_type);
  if (status.ok()) status = CheckType("out", sizes.result_type, sizes.lhs_type);
  return status;
}

Status CheckGroupedMatmulRhsGradientLaunch(const GroupedMatmulConfig& config,
                                           const GroupedMatmulSizes& sizes) {
  Status status = Check(config, sizes);
  if (status.ok() && sizes.result_type != sizes.lhs_type) {
    status = Unimplemented("out_gradient is not of lhs's type; the kernels take no other");
  }
  if (status.ok()) status = CheckType("rhs_gradient", sizes.rhs_type, sizes.lhs_type);
  return status;
}

Status LoadGroupedMatmul() {
  const auto load = [](const MatmulKernel& kernel) {
    return FromCuda(
        cudaFuncSetAttribute(kernel.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel.shared_bytes),
        "loading grouped matmul");
  };
  bool is_sm90 = false;
  if (Status status = IsComputeCapability(9, 0, &is_sm90); !status.ok()) return status;
  for (MatmulKind kind : kKinds) {
    if (Status status = load(Float32MatmulKernel(kind)); !status.ok()) return status;
    for (bool is_bfloat16 : {false, true}) {
      if (is_sm90) {
        Status status = load(Sm90MatmulKernel(is_bfloat16, kind));
        if (!status.ok()) return status;
      }
      for (bool copied : {false, true}) {
        Status status = load(SixteenBitMatmulKernel(is_bfloat16, kind, copied));
        if (!status.ok()) return status;
      }
    }
  }
  return {};
}

int32_t NewTileCounter() {
  static std::atomic<int32_t> next = 0;
  const int32_t number = next.fetch_add(1);
  if (number < kNumSm90TileCounters) return number;
  next = kNumSm90TileCounters;
  return -1;
}

Status LaunchGroupedMatmul(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes,
                           const void* lhs, const void* rhs, const int32_t* group_sizes, void* out,
                           int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulLaunch(config, sizes);
  if (!status.ok() || sizes.num_rows == 0 || sizes.columns == 0) return status;

  const int64_t rhs_pitch = config.transpose_rhs ? sizes.contracted : sizes.columns;
  MatmulProblem problem = {};
  problem.left = Operand(lhs, sizes.lhs_type, sizes.contracted);
  problem.right = Operand(rhs, sizes.rhs_type, rhs_pitch);
  problem.out = out;
  problem.num_n = static_cast<int32_t>(sizes.columns);
  problem.num_k = static_cast<int32_t>(sizes.contracted);
  problem.rows = Rows(sizes, group_sizes, config.zero_tail);
  problem.tile_counter = tile_counter;
  return Launch(config,
                config.transpose_rhs ? MatmulKind::kForwardTransposed : MatmulKind::kForward,
                sizes.lhs_type, sizes.result_type, problem, stream);
}

Status LaunchGroupedMatmulRhsGradient(const GroupedMatmulConfig& config,
                                      const GroupedMatmulSizes& sizes, const void* lhs,
                                      const void* out_gradient, const int32_t* group_sizes,
                                      void* rhs_gradient, int32_t tile_counter,
                                      cudaStream_t stream) {
  Status status = CheckGroupedMatmulRhsGradientLaunch(config, sizes);
  if (!status.ok() || sizes.num_groups == 0 || sizes.contracted == 0 || sizes.columns == 0) {
    return status;
  }

  // The transposed gradient is that of the operands in the other order.
  MatmulOperand left = Operand(lhs, sizes.lhs_type, sizes.contracted);
  MatmulOperand right = Operand(out_gradient, sizes.result_type, sizes.columns);
  if (config.transpose_rhs) std::swap(left, right);
  MatmulProblem problem = {};
  problem.left = left;
  problem.right = right;
  problem.out = rhs_gradient;
  problem.num_m = static_cast<int32_t>(left.pitch);
  problem.num_n = static_cast<int32_t>(right.pitch);
  problem.rows = Rows(sizes, group_sizes, false);
  problem.tile_counter = tile_counter;
  return Launch(config, MatmulKind::kGradient, sizes.lhs_type, sizes.rhs_type, problem, stream);
}

}  // namespace jax_ep
