// Compares what some 400 calls launch with choices.txt: kernel, grid, shared memory, workspace. A
// change of a choice shows there.
//
//   choices_test FILE        compares; an argument after it writes the file anew
//
// No kernel runs: its address is its name, and its tiles are those of the kernel.
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "ffi/kernels/matmul/grouped_matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_activation.h"
#include "ffi/kernels/matmul/grouped_matmul_fp8.h"
#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/kernels.h"
#include "ffi/kernels/transfer/launch.h"
#include "tests/cpp/unit/check.h"

namespace {

struct Device {
  const char* name;
  int major, minor, num_sms, bus_bits, shared_bytes;
};
constexpr Device kDevices[] = {{"A100", 8, 0, 108, 5120, 166912},
                               {"H100", 9, 0, 132, 5120, 232448},
                               {"H200", 9, 0, 132, 6144, 232448},
                               {"B200", 10, 0, 148, 8192, 232448}};
Device device = kDevices[0];
std::ostringstream text;

const void* Named(const std::string& name) {
  static auto& names = *new std::map<std::string, std::string>;
  return names.try_emplace(name, name).first->second.c_str();
}
const char* NameOf(const void* kernel) { return static_cast<const char*>(kernel); }

}  // namespace

// ---- The CUDA runtime of these devices

cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? device.num_sms
           : attribute == cudaDevAttrComputeCapabilityMajor       ? device.major
           : attribute == cudaDevAttrComputeCapabilityMinor       ? device.minor
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? device.shared_bytes
                                                                  : device.bus_bits;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorInvalidValue; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  const std::string name = NameOf(kernel);
  text << "; " << name << ", " << config->gridDim.x << " blocks of " << config->blockDim.x << ", "
       << config->dynamicSmemBytes << " B";
  if (config->numAttrs > 0) text << ", clusters of " << config->attrs[0].val.clusterDim.x;
  const bool is_sm90 = name.starts_with("sm90");
  const auto& params = *static_cast<const jax_ep::MatmulParams*>(arguments[is_sm90 ? 1 : 0]);
  text << ", " << params.out_tile_n << " columns";
  if (params.halves_columns) text << ", halves columns";
  if (is_sm90 && params.halves_rows) text << ", halves rows";
  if (params.has_few_pairs) text << ", few pairs";
  return cudaSuccess;
}

namespace jax_ep {

// ---- The kernels

namespace {

constexpr const char* kKinds[] = {"forward", "transposed", "rhs gradient", "activation",
                                  "activation gradient"};
std::string NameOf(MatmulKind kind) { return kKinds[static_cast<int>(kind)]; }

std::string NameOf(ElementType type) {
  return type == kBF16     ? "bf16"
         : type == kF16    ? "f16"
         : type == kF32    ? "f32"
         : type == kF4E2M1 ? "f4"
                           : "f8";
}

Sm90Kernel MakeSm90(const std::string& name, int tile_m, int tile_n) {
  return {.kernel = {.address = Named("sm90 " + name),
                     .threads = 384,
                     .cluster_blocks = 2,
                     .shared_bytes = 231616,
                     .tile_m = tile_m,
                     .tile_n = tile_n},
          .a_box_rows = 64,
          .b_box_rows = 64};
}

}  // namespace

Sm90Kernel Sm90RhsGradientKernel(bool is_bfloat16) {
  return MakeSm90(is_bfloat16 ? "bf16 rhs gradient" : "f16 rhs gradient", 128, 256);
}
Sm90Kernel Sm90SwappedMatmulKernel(bool is_bfloat16, MatmulKind kind) {
  const std::string name = (is_bfloat16 ? "bf16 " : "f16 ") + NameOf(kind);
  Sm90Kernel kernel = MakeSm90(name, 256, 128);
  if (kind != MatmulKind::kActivationGradient) kernel.wide_address = Named("sm90 wide " + name);
  kernel.a_narrow_box_rows = 16;
  kernel.b_narrow_box_rows = 64;
  kernel.has_half_tiles = kind == MatmulKind::kForward || kind == MatmulKind::kForwardTransposed;
  return kernel;
}
Sm90Kernel Fp8MatmulKernel(Fp8Kind kind, bool is_short) {
  constexpr const char* kNames[] = {"f8 blocks", "f8 rows", "f8 rows of e5m2"};
  return MakeSm90(Concatenate(kNames[static_cast<int>(kind)], is_short ? ", short" : ""), 128, 256);
}
Sm90Kernel Fp8ActivationKernel() { return MakeSm90("f8 activation", 128, 256); }
static Sm90Kernel MakeMxFp4(const std::string& name) {
  Sm90Kernel kernel = MakeSm90(name, 256, 128);
  kernel.a_narrow_box_rows = 16;
  kernel.b_narrow_box_rows = 64;
  return kernel;
}
Sm90Kernel Sm90MxFp4MatmulKernel() { return MakeMxFp4("mxfp4"); }
Sm90Kernel Sm90MxFp4DecodeKernel(bool is_narrow) {
  Sm90Kernel kernel =
      MakeSm90(is_narrow ? "mxfp4 narrow decode" : "mxfp4 decode", 16, is_narrow ? 64 : 128);
  kernel.kernel.cluster_blocks = 1;
  kernel.a_box_rows = 16;
  kernel.a_narrow_box_rows = 8;
  kernel.a_box_column_blocks = is_narrow ? 8 : 4;
  return kernel;
}
Sm90Kernel Sm90MxFp4ActivationKernel() { return MakeMxFp4("mxfp4 activation"); }
Sm90Kernel Sm90MxFp4LhsGradientKernel() { return MakeMxFp4("mxfp4 lhs gradient"); }
Sm90Kernel Fp8RhsGradientKernel(bool is_short) {
  return MakeSm90(Concatenate("f8 gradient", is_short ? ", short" : ""), 128, 256);
}

MatmulKernel Portable16BitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool use_cp_async) {
  return {.address = Named(Concatenate("portable ", is_bfloat16 ? "bf16 " : "f16 ", NameOf(kind),
                                       use_cp_async ? "" : ", without cp.async")),
          .threads = 256,
          .shared_bytes = 98304,
          .tile_m = 128,
          .tile_n = 256,
          .store_elements = 2};
}
MatmulKernel PortableFloat32MatmulKernel(MatmulKind kind) {
  return {.address = Named("portable f32 " + NameOf(kind)),
          .threads = 256,
          .shared_bytes = 33792,
          .tile_m = 128,
          .tile_n = 128,
          .store_elements = 4};
}
MatmulKernel PortableActivationGradientKernel(ElementType type) {
  return {.address = Named("portable " + NameOf(type) + " activation gradient"),
          .threads = 256,
          .shared_bytes = 0,
          .tile_m = 8,
          .tile_n = 1};
}

const void* StartGenerationKernelAddress() { return Named("start"); }
const void* DispatchKernelAddress() { return Named("dispatch"); }
const void* RedispatchKernelAddress() { return Named("redispatch"); }
const void* CombineKernelAddress(RowType) { return Named("combine"); }
const void* LowLatencyDispatchKernelAddress() { return Named("low-latency dispatch"); }
const void* LowLatencyRedispatchKernelAddress() { return Named("low-latency redispatch"); }
const void* LowLatencyCombineKernelAddress(RowType) { return Named("low-latency combine"); }
const void* HierarchicalDispatchKernelAddress() { return Named("dispatch over domains"); }
const void* HierarchicalRedispatchKernelAddress() { return Named("redispatch over domains"); }
const void* HierarchicalCombineKernelAddress(RowType) { return Named("combine over domains"); }
const void* HierarchicalLowLatencyDispatchKernelAddress() {
  return Named("low-latency dispatch over domains");
}
const void* HierarchicalLowLatencyRedispatchKernelAddress() {
  return Named("low-latency redispatch over domains");
}
const void* HierarchicalLowLatencyCombineKernelAddress(RowType) {
  return Named("low-latency combine over domains");
}
const void* BulkCopyCeilingKernelAddress() { return Named("bulk copies"); }

// ---- The calls

namespace {

struct Shape {
  int64_t groups, rows, k, n;
};
// Training and decoding with the experts of models, and odd ones.
constexpr Shape kShapes[] = {
    {8, 4096, 2048, 1408},  {32, 32768, 7168, 2048}, {32, 32768, 2048, 7168},
    {64, 8192, 2048, 1024}, {16, 2048, 2880, 2880},  {128, 1024, 2048, 768},
    {256, 256, 7168, 2048}, {4, 64, 2048, 1024},     {2, 160, 512, 512},
    {8, 800, 2048, 1024},   {16, 1600, 4096, 512},   {3, 77, 100, 60},
    {4, 0, 64, 64},         {4, 128, 0, 64}};

// The experts of gpt-oss; the most rows that decode, and more; values of K that do not.
constexpr Shape kDecodeShapes[] = {{32, 16, 2880, 5760},
                                   {32, 320, 2880, 2880},
                                   {32, 321, 2880, 2880},
                                   {32, 16, 2848, 2880},
                                   {32, 16, 7168, 2048}};

void* At(uintptr_t number, uintptr_t offset = 0) {
  return reinterpret_cast<void*>((number << 32) + offset);
}

void Begin(const char* what, ElementType type, const Shape& shape) {
  text << device.name << " " << what << " " << NameOf(type) << " " << shape.groups << " x "
       << shape.rows << " x " << shape.k << " x " << shape.n;
}
void End(const Status& status) {
  if (!status.ok()) text << "; " << status.message;
  text << "\n";
}

GroupedMatmulSizes SizesOf(const Shape& shape, ElementType type) {
  return {shape.groups, shape.rows, shape.k, shape.n, type, type, type};
}

// `offset`: of rhs, in bytes.
void Matmuls(const Shape& shape, ElementType type, int64_t num_sms = 0, uintptr_t offset = 0) {
  const GroupedMatmulSizes sizes = SizesOf(shape, type);
  auto* const group_sizes = static_cast<int32_t*>(At(3));
  for (bool transposed : {false, true}) {
    Begin(transposed ? "transposed" : "forward", type, shape);
    End(LaunchGroupedMatmul({.transpose_rhs = transposed, .num_sms = num_sms}, sizes, At(1),
                            At(2, offset), group_sizes, At(4), 0, nullptr));
  }
  Begin("rhs gradient", type, shape);
  End(LaunchGroupedMatmulRhsGradient({.num_sms = num_sms}, sizes, At(1), At(2, offset), group_sizes,
                                     At(4), 0, nullptr));
  const GroupedMatmulActivationConfig config = {.activation = Activation::kSwiglu,
                                                .num_sms = num_sms};
  Begin("activation", type, shape);
  End(LaunchGroupedMatmulActivation(
      config, sizes, {.lhs = At(1), .rhs = At(2, offset), .group_sizes = group_sizes, .out = At(4)},
      0, nullptr));
  Begin("activation gradient", type, shape);
  End(LaunchGroupedMatmulActivationGradient(config, sizes,
                                            {.out_gradient = At(1),
                                             .rhs = At(2, offset),
                                             .group_sizes = group_sizes,
                                             .pre_activation = At(5),
                                             .pre_activation_gradient = At(6),
                                             .activations = At(4),
                                             .row_dots = static_cast<float*>(At(7))},
                                            0, nullptr));
}

void Fp8Matmuls(const Shape& shape) {
  const auto floats = [](int number) { return static_cast<float*>(At(number)); };
  Fp8Matmul call = {.lhs = At(1),
                    .lhs_scales = floats(2),
                    .rhs = At(3),
                    .rhs_scales = floats(4),
                    .group_sizes = static_cast<int32_t*>(At(5)),
                    .out = At(6)};
  GroupedMatmulSizes sizes = SizesOf(shape, kF8E4M3);
  sizes.result_type = kBF16;
  for (Fp8Kind kind : {Fp8Kind::kBlock128, Fp8Kind::kRowE5M2}) {
    call.kind = kind;
    Begin("transposed", kF8E4M3, shape);
    End(LaunchGroupedMatmulFp8(call, sizes, 0, nullptr));
  }
  call.kind = Fp8Kind::kBlock128;
  Begin("activation", kF8E4M3, shape);
  End(LaunchGroupedMatmulFp8Activation(
      call, {.activation = Activation::kSwiglu, .out_scales = floats(7)}, sizes, 0, nullptr));
}

// `offset`: of the scales, in bytes.
void MxFp4Matmuls(const Shape& shape, uintptr_t offset = 0) {
  GroupedMatmulSizes sizes = SizesOf(shape, kBF16);
  sizes.rhs_type = kF4E2M1;
  const MxFp4Matmul call = {.lhs = At(1),
                            .rhs = At(2),
                            .rhs_scales = static_cast<uint8_t*>(At(3, offset)),
                            .group_sizes = static_cast<int32_t*>(At(4)),
                            .out = At(5)};
  Begin("transposed", kF4E2M1, shape);
  End(LaunchGroupedMatmulMxFp4(call, sizes, 0, nullptr));
  Begin("lhs gradient", kF4E2M1, shape);
  End(LaunchGroupedMatmulMxFp4LhsGradient(call, sizes, 0, nullptr));
  Begin("activation", kF4E2M1, shape);
  End(LaunchGroupedMatmulMxFp4Activation(
      call, {.activation = Activation::kSwiglu, .limit = 7, .alpha = 1.702f}, sizes, 0, nullptr));
}

template <typename Params>
void Describe(const char* what, const TransferCall& call, const PreparedCall<Params>& prepared,
              const Status& status) {
  const TransferShape& shape = call.shape;
  text << device.name << " " << what << " of " << shape.num_tokens << " x " << shape.hidden
       << ", top " << shape.top_k << " of " << shape.num_experts << " on " << shape.num_ranks
       << (shape.num_scales() > 0 ? ", f8" : "");
  if (shape.has_domains()) text << ", domains of " << shape.domain_size;
  for (const KernelLaunch& launch : prepared.launches) {
    text << "; " << ::NameOf(launch.kernel) << ", " << launch.blocks << " blocks of "
         << launch.threads << ", " << launch.shared_bytes << " B";
  }
  if (status.ok()) text << ", workspace " << CallOf(prepared.params).workspace_bytes;
  End(status);
}

void Transfers(int64_t num_tokens, int64_t hidden, int64_t num_ranks, bool is_quantized,
               int64_t domain_size = 0) {
  TransferCall call = {
      .shape = {.num_tokens = num_tokens,
                .hidden = hidden,
                .top_k = 8,
                .num_experts = 16 * num_ranks,
                .num_ranks = num_ranks,
                .num_rows = 8 * num_tokens + 2048,
                .domain_size = domain_size,
                .format = is_quantized ? QuantizedRowFormat(kF8E4M3, 128) : kBFloat16Rows}};
  PreparedDispatch dispatch;
  Status status = PrepareDispatch(call, &dispatch);
  Describe("dispatch", call, dispatch, status);
  PreparedRedispatch redispatch;
  status = PrepareRedispatch(call, &redispatch);
  Describe("redispatch", call, redispatch, status);
  if (is_quantized) return;
  PreparedCombine combine;
  status = PrepareCombine(call, &combine);
  Describe("combine", call, combine, status);
}

void AllCalls() {
  for (const Device& one : kDevices) {
    device = one;
    const bool is_hopper = one.major == 9;
    for (size_t i = 0; i < std::size(kShapes); i += is_hopper ? 1 : 2) {
      Matmuls(kShapes[i], kBF16);
      if (is_hopper && one.bus_bits == 5120) {
        Fp8Matmuls(kShapes[i]);
        MxFp4Matmuls(kShapes[i]);
      }
    }
    Matmuls(kShapes[0], kF16);
    Matmuls(kShapes[0], kF32);
    Matmuls(kShapes[0], kBF16, 20);
    Matmuls(kShapes[0], kBF16, 0, 4);
    Fp8Matmuls(kShapes[0]);
    MxFp4Matmuls(kShapes[0]);
    MxFp4Matmuls(kShapes[0], 2);
    if (one.bus_bits > 5120) continue;  // transfers do not ask
    if (is_hopper) {
      for (const Shape& shape : kDecodeShapes) MxFp4Matmuls(shape);
      MxFp4Matmuls(kDecodeShapes[0], 4);
    }
    for (int64_t num_tokens : {1, 128, 4096}) {
      for (int64_t num_ranks : {1, 8, 64}) {
        for (bool is_quantized : {false, true}) {
          Transfers(num_tokens, 7168, num_ranks, is_quantized);
          if (num_ranks == 64) Transfers(num_tokens, 7168, num_ranks, is_quantized, 8);
        }
      }
    }
  }
}

void Compare(const std::string& expected) {
  std::istringstream got(text.str()), want(expected);
  std::string got_line, want_line;
  while (true) {
    const bool has_got = static_cast<bool>(std::getline(got, got_line));
    const bool has_want = static_cast<bool>(std::getline(want, want_line));
    CHECK(has_got == has_want);
    if (!has_got || !has_want) return;
    if (got_line != want_line) testing::Report(__FILE__, __LINE__, want_line.c_str(), got_line);
  }
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) {
  jax_ep::AllCalls();
  if (argc > 2) {
    std::ofstream(argv[1]) << text.str();
    return 0;
  }
  std::stringstream expected;
  expected << std::ifstream(argv[1]).rdbuf();
  jax_ep::Compare(expected.str());
  return jax_ep::testing::Finish();
}
