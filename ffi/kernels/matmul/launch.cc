#include "ffi/kernels/matmul/launch.h"

#include "ffi/device/common/limits.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/load_kernel.h"
#include "ffi/kernels/matmul/family.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep {
namespace {

// In the order in which they are asked. The last one refuses quantized operands only.
constexpr const MatmulFamily& (*kFamilies[])() = {Sm90Matmuls, Sm90Fp8Matmuls, Sm90MxFp4Matmuls,
                                                  PortableMatmuls};

Status FindFamily(const MatmulCall& call, const MatmulFamily** family) {
  ComputeCapability device;
  if (Status status = FindComputeCapability(&device); !status.ok()) return status;
  for (const auto& make : kFamilies) {
    *family = &make();
    if ((*family)->RunsOn(device) && (*family)->Supports(call)) return {};
  }
  const char* const operands = call.mxfp4 ? "MXFP4 weights" : "8-bit operands";
  return FailedPrecondition(
      operands, " need a GPU of compute capability ", kEightBitCapability / 10, ".",
      kEightBitCapability % 10,
      "; this one has another. Lower the program on a machine with this GPU, or use "
      "implementation=\"xla\"");
}

}  // namespace

Status LoadMatmulKernels() {
  ComputeCapability device;
  if (Status status = FindComputeCapability(&device); !status.ok()) return status;
  for (const auto& make : kFamilies) {
    if (!make().RunsOn(device)) continue;
    for (const MatmulKernel& kernel : make().Kernels()) {
      if (kernel.address == nullptr) continue;
      Status status = LoadKernel(kernel.address, kernel.shared_bytes, "loading grouped matmul");
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status CheckMatmulLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  if (num_sms < 0) return InvalidArgument("num_sms is ", num_sms);
  Status status = CheckCounts({{"L", sizes.num_groups},
                               {"M", sizes.num_rows},
                               {"K", sizes.contracted},
                               {"N", sizes.columns}});
  if (!status.ok()) return status;
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

Status CheckMultiples(const char* kernels_take, std::initializer_list<SizeMultiple> sizes) {
  for (const auto& [name, value, multiple] : sizes) {
    if (value % multiple == 0 && value > 0) continue;
    return Unimplemented(name, " is ", value, "; ", kernels_take, " positive multiples of ",
                         multiple);
  }
  return {};
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

Status LaunchMatmul(MatmulCall call, cudaStream_t stream) {
  const MatmulFamily* family = nullptr;
  Status status = FindFamily(call, &family);
  if (status.ok() && call.num_sms == 0) status = CountSms(&call.num_sms);
  MatmulPlan plan;
  if (status.ok()) status = family->Plan(call, &plan);
  for (const MatmulLaunch& launch : plan) {
    if (status.ok()) status = launch.Launch(stream);
  }
  return status;
}

}  // namespace jax_ep
