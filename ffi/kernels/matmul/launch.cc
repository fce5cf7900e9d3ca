#include "ffi/kernels/matmul/launch.h"

#include <algorithm>
#include <vector>

#include "ffi/kernels/matmul/fp8_kernels.h"
#include "ffi/kernels/matmul/kernels.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/kernels/matmul/swapped_choice.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

namespace {

bool IsAligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Returns whether the asynchronous copies, cp.async and TMA, can load an operand: they do not
// convert, and need alignment.
bool IsCopyable(const MatmulOperand& operand) { return operand.is_aligned && !operand.is_float32; }

// Returns whether sm_90a's kernel supports a call: the requirements of TMA, of vector loads and
// stores in its epilogues, and a result that is not empty or all zeros.
bool Sm90Supports(MatmulKind kind, ElementType type, const MatmulParams& params) {
  constexpr int64_t kMaxColumns = kMaxItems / 2;  // gated pre-activations have twice as many
  const EpilogueParams& epilogue = params.epilogue;
  return type != kF32 && IsCopyable(params.a) && IsCopyable(params.b) && params.shape_n % 8 == 0 &&
         params.shape_n <= kMaxColumns && IsAligned(params.out, 16) &&
         IsAligned(epilogue.pre_activation, 16) &&
         IsAligned(epilogue.pre_activation_gradient, 16) && IsAligned(epilogue.bias, 8) &&
         (kind == MatmulKind::kRhsGradient ? params.shape_m : params.shape_k) > 0 &&
         params.groups.num_groups > 0 && params.groups.num_rows > 0;
}

// Depends on static shapes and alignment only, so that all calls of a program use the same kernel.
MatmulKernel ChooseKernel(MatmulKind kind, ElementType type, bool has_sm90a,
                          const MatmulParams& params) {
  if (has_sm90a && Sm90Supports(kind, type, params)) return Sm90MatmulKernel(type == kBF16, kind);
  if (kind == MatmulKind::kActivationGradient) return PortableActivationGradientKernel(type);
  if (type == kF32) return PortableFloat32MatmulKernel(kind);
  return Portable16BitMatmulKernel(type == kBF16, kind,
                                   IsCopyable(params.a) && IsCopyable(params.b));
}

Status MakeTensorMaps(MatmulKind kind, const MatmulKernel& kernel, ElementType type,
                      ElementType out_type, const MatmulParams& params, MatmulTensorMaps* maps) {
  const bool is_rhs_gradient = kind == MatmulKind::kRhsGradient;
  const int64_t rows = params.groups.num_rows;
  const int64_t groups = params.groups.num_groups;
  const int64_t columns = params.shape_n;
  const int64_t b_rows =
      HasTransposedB(kind) ? columns : params.shape_k;  // rows of one group's matrix
  const auto prefixes = [rows](const void* base, ElementType element, int64_t row_stride) {
    return MappedTensor::Prefixes(base, element, row_stride, row_stride, rows);
  };
  const MatmulOperand& a = params.a;
  const MatmulOperand& b = params.b;
  const MappedTensor mapped_b =
      is_rhs_gradient ? prefixes(b.data, type, b.row_stride)
                      : MappedTensor::Stack(b.data, type, b.row_stride, b_rows, groups);
  Status status =
      MakeTensorMap(prefixes(a.data, type, a.row_stride), {kernel.a_box_rows}, &maps->a);
  if (!status.ok()) return status;
  status = MakeTensorMap(mapped_b, {kernel.b_box_rows, params.b_column_blocks}, &maps->b);
  if (!status.ok()) return status;
  if (kernel.a_narrow_box_rows > 0) {
    status = MakeTensorMap(prefixes(a.data, type, a.row_stride), {kernel.a_narrow_box_rows},
                           &maps->a_narrow);
    if (!status.ok()) return status;
    status = MakeTensorMap(mapped_b, {.rows = kernel.b_narrow_box_rows, .is_narrow = true},
                           &maps->b_narrow);
    if (!status.ok()) return status;
  }
  status = MakeTensorMap(
      is_rhs_gradient ? MappedTensor::Stack(params.out, out_type, columns, params.shape_m, groups)
                      : prefixes(params.out, out_type, columns),
      kernel.float32_box_rows > 0 && out_type == kF32
          ? BoxShape{.rows = kernel.float32_box_rows, .columns = kernel.float32_box_columns}
          : BoxShape{kSm90OutBoxRows},
      &maps->out);
  const void* const pre_activation = params.epilogue.pre_activation;
  if (!status.ok() || kind != MatmulKind::kActivation || pre_activation == nullptr) return status;
  // A row has the gate columns, then the up columns.
  const int64_t halves = params.epilogue.activation.is_gated ? 2 : 1;
  for (int64_t half = 0; status.ok() && half < halves; ++half) {
    const void* const first =
        static_cast<const char*>(pre_activation) + half * columns * ElementBytes(type);
    status = MakeTensorMap(MappedTensor::Prefixes(first, type, columns, halves * columns, rows),
                           {kSm90OutBoxRows}, &maps->pre_activation[half]);
  }
  return status;
}

}  // namespace

Status LoadMatmulKernels() {
  bool has_sm90a = false;
  if (Status status = IsComputeCapability(9, 0, &has_sm90a); !status.ok()) return status;
  std::vector<MatmulKernel> kernels;
  for (ElementType type : {kBF16, kF16, kF32}) {
    kernels.push_back(PortableActivationGradientKernel(type));
  }
  for (MatmulKind kind :
       {MatmulKind::kForward, MatmulKind::kForwardTransposed, MatmulKind::kRhsGradient,
        MatmulKind::kActivation, MatmulKind::kActivationGradient}) {
    kernels.push_back(PortableFloat32MatmulKernel(kind));
    for (bool is_bfloat16 : {false, true}) {
      for (bool use_cp_async : {false, true}) {
        kernels.push_back(Portable16BitMatmulKernel(is_bfloat16, kind, use_cp_async));
      }
      if (has_sm90a) kernels.push_back(Sm90MatmulKernel(is_bfloat16, kind));
    }
  }
  for (Fp8Kind kind : {Fp8Kind::kBlock128, Fp8Kind::kRow, Fp8Kind::kRowE5M2}) {
    for (bool is_short : {false, true}) {
      if (has_sm90a) kernels.push_back(Fp8MatmulKernel(kind, is_short));
    }
  }
  if (has_sm90a) kernels.push_back(Fp8ActivationKernel());
  for (const MatmulKernel& kernel : kernels) {
    for (const void* address : {kernel.address, kernel.wide_address}) {
      if (address == nullptr) continue;
      Status status =
          FromCuda(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        kernel.shared_bytes),
                   "loading grouped matmul");
      cudaFuncAttributes attributes;  // setting an attribute may not load the code; reading does
      if (status.ok()) {
        status = FromCuda(cudaFuncGetAttributes(&attributes, address), "loading grouped matmul");
      }
      if (!status.ok()) return status;
    }
  }
  return {};
}

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

MatmulOperand MakeOperand(const void* data, ElementType type, int64_t row_stride) {
  return {.data = data,
          .row_stride = row_stride,
          .is_float32 = type == kF32,
          .is_aligned = IsAligned(data, 16) && row_stride * ElementBytes(type) % 16 == 0};
}

RowGroups MakeRowGroups(const GroupedMatmulSizes& sizes, const int32_t* group_sizes,
                        bool zero_tail) {
  return {.sizes = group_sizes,
          .num_groups = static_cast<int32_t>(sizes.num_groups),
          .num_rows = static_cast<int32_t>(sizes.num_rows),
          .zero_tail = zero_tail};
}

Status LaunchMatmul(MatmulKind kind, ElementType type, ElementType out_type, int64_t num_sms,
                    MatmulParams params, cudaStream_t stream) {
  bool has_sm90a = false;
  Status status = IsComputeCapability(9, 0, &has_sm90a);
  if (!status.ok()) return status;
  MatmulKernel kernel = ChooseKernel(kind, type, has_sm90a, params);
  params.b_column_blocks = params.shape_n % kSm90ColumnBlock == 0 ? kernel.b_box_column_blocks : 1;
  MatmulTensorMaps maps;
  const bool takes_maps = kernel.a_box_rows > 0;
  if (takes_maps) {
    status = MakeTensorMaps(kind, kernel, type, out_type, params, &maps);
  } else if (kind == MatmulKind::kActivationGradient) {
    status = LaunchMatmul(MatmulKind::kForwardTransposed, type, out_type, num_sms, params, stream);
  }
  if (!status.ok()) return status;
  const bool is_gated = kind == MatmulKind::kActivation && params.epilogue.activation.is_gated;
  params.out_tile_n = is_gated ? kernel.tile_n / 2 : kernel.tile_n;
  params.out_is_float32 = out_type == kF32;
  params.out_is_aligned = params.shape_n % kernel.store_elements == 0 &&
                          IsAligned(params.out, kernel.store_elements * ElementBytes(out_type));

  if (num_sms == 0) status = CountSms(&num_sms);
  if (!status.ok()) return status;
  const SwappedCall call = {.num_groups = params.groups.num_groups,
                            .num_rows = params.groups.num_rows,
                            .tiles_n = CeilDivide(int64_t{params.shape_n}, params.out_tile_n),
                            .clusters = std::max<int64_t>(num_sms / kernel.cluster_blocks, 1)};
  params.halves_columns = kernel.has_half_tiles && call.HasFewTiles();
  params.halves_rows = call.HasFewTiles();
  if (kernel.wide_address != nullptr && out_type != kF32) {
    int bus_bits = 0;
    if (status = FindMemoryBusBits(&bus_bits); !status.ok()) return status;
    if (call.TakesWidePairs(bus_bits)) kernel.address = kernel.wide_address;
  }

  // With many waves of tiles the last one matters little. With few rows per group reading memory
  // bounds all tiles alike.
  constexpr int64_t kFewWaves = 16;
  const int64_t tiles = MaxTiles(kind, kernel, params);
  params.has_few_pairs = kernel.a_narrow_box_rows > 0 && !call.HasFewRows() &&
                         tiles <= kFewWaves * std::min<int64_t>(num_sms, kMaxItems);
  if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
  void* maps_and_params[] = {&maps, &params};
  void* only_params[] = {&params};
  return LaunchPersistentKernel(kernel, tiles, num_sms, takes_maps ? maps_and_params : only_params,
                                stream);
}

int64_t MaxTiles(MatmulKind kind, const MatmulKernel& kernel, const MatmulParams& params) {
  const int64_t groups = params.groups.num_groups;
  const int64_t tiles_m = kind == MatmulKind::kRhsGradient
                              ? groups * CeilDivide(params.shape_m, kernel.tile_m)
                              : params.groups.num_rows / kernel.tile_m + groups + 1;
  return tiles_m * CeilDivide(params.shape_n, params.out_tile_n);
}

Status LaunchPersistentKernel(const MatmulKernel& kernel, int64_t tiles, int64_t num_sms,
                              void** arguments, cudaStream_t stream) {
  int64_t blocks = num_sms;
  if (blocks == 0) {
    if (Status status = CountSms(&blocks); !status.ok()) return status;
  }
  const int64_t max_clusters = std::min<int64_t>(tiles, kMaxItems / kernel.cluster_blocks);
  blocks =
      std::clamp(blocks / kernel.cluster_blocks, int64_t{1}, max_clusters) * kernel.cluster_blocks;
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

}  // namespace jax_ep
