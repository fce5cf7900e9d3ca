// Computes gradients of gated activations and quantizes them, for sm_80 and newer: those of the
// pre-activation as they are and transposed, and the activations transposed.
//
// A thread block takes 128 columns of the activations in a row block, that is 128 of the gate's and
// 128 of up's. Each thread keeps its vectors in shared memory, where it replaces three operands by
// three results; they would need 96 registers. They are quantized one after the other, as the rows
// of quantize_transposed are.
#include "ffi/device/matmul/activation.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/quantize/activation_gradient_params.h"
#include "ffi/device/quantize/quantize_rows.cuh"
#include "ffi/device/quantize/row_block.cuh"
#include "ffi/device/quantize/transpose_rows.cuh"
#include "ffi/kernels/quantize/activation_gradient_kernels.h"

namespace jax_ep {
namespace {

using namespace transpose;

using Type = BFloat16;

constexpr int kElements = kPerVector<Type>;
constexpr int kBlockThreads = kThreads<Type>;
static_assert(kBlockThreads == kActivationGradientThreads);

// Names what a thread keeps of each row: first operands, then results.
enum Slot { kActivations, kGate, kUp, kSlots };
static_assert(kSlots * kThreadRows * sizeof(uint4) * kBlockThreads ==
              kActivationGradientSharedBytes);

// The thread's vectors, [slots][rows][threads].
struct Vectors {
  uint4* own;

  __device__ uint4* At(int slot, int row) const {
    return own + (slot * kThreadRows + row) * kBlockThreads;
  }

  __device__ FloatRows<Type> Rows(int slot) const {
    FloatRows<Type> rows;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) rows.vectors[i] = *At(slot, i);
    return rows;
  }
};

// Loads all operands of the thread before it waits for the first.
__device__ void LoadOperands(const ActivationGradientParams& params, const Place& place,
                             const Vectors& vectors) {
  const int64_t columns = params.activations.columns;
  const auto* const gradient = static_cast<const uint16_t*>(params.activations_gradient) +
                               place.row * columns + place.column;
  const auto* const gate =
      static_cast<const uint16_t*>(params.pre_activation) + 2 * place.row * columns + place.column;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const bool is_row = i < place.num_rows;
    CpAsync<16>(SharedAddress(vectors.At(kActivations, i)), gradient + i * columns, is_row);
    CpAsync<16>(SharedAddress(vectors.At(kGate, i)), gate + 2 * i * columns, is_row);
    CpAsync<16>(SharedAddress(vectors.At(kUp, i)), gate + (2 * i + 1) * columns, is_row);
  }
  CpAsyncCommitGroup();
  CpAsyncWaitGroup<0>();
}

// Replaces the operands of a row by its results. Returns the dot product of the activations, not
// weighted, and their gradient.
__device__ float ReplaceByGradients(const ActivationFunction& f, float weight,
                                    const Vectors& vectors, int row) {
  float gradient[kElements], gate[kElements], up[kElements];
  UnpackVector<Type>(*vectors.At(kActivations, row), gradient);
  UnpackVector<Type>(*vectors.At(kGate, row), gate);
  UnpackVector<Type>(*vectors.At(kUp, row), up);
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const ActivationResult of_gate = ActivateFast<true>(f, gate[i]);
    const float activated = of_gate.value * up[i];
    dot += activated * gradient[i];
    const float weighted = weight * gradient[i];
    gate[i] = weighted * up[i] * of_gate.derivative;
    up[i] = weighted * of_gate.value;
    gradient[i] = weight * activated;
  }
  *vectors.At(kActivations, row) = PackVector<Type>(gradient);
  *vectors.At(kGate, row) = PackVector<Type>(gate);
  *vectors.At(kUp, row) = PackVector<Type>(up);
  return dot;
}

__device__ void ReplaceByGradients(const ActivationGradientParams& params, const Place& place,
                                   const Vectors& vectors) {
  float dots[kThreadRows];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const bool is_weighted = params.row_weights != nullptr && i < place.num_rows;
    const float weight = is_weighted ? __ldg(params.row_weights + place.row + i) : 1.0f;
    dots[i] = ReplaceByGradients(params.activation, weight, vectors, i);
  }
  const auto add = [](float a, float b) { return a + b; };
  const float dot = ReduceRows<Type>(dots, add);
  const int own_row = static_cast<int>(threadIdx.x) % kThreadRows;
  if (StoresRow<Type>() && own_row < place.num_rows) {
    params.row_dots[(place.row + own_row) * params.activations.column_blocks + place.column_block] =
        dot;
  }
}

}  // namespace

__global__ void __launch_bounds__(kBlockThreads, 2)
    QuantizeActivationGradientKernel(const __grid_constant__ ActivationGradientParams params) {
  Place place = FindPlace<Type>(params.activations);
  if (params.activations.num_rows[place.row_block] <= 0) return;
  auto* const shared = reinterpret_cast<uint4*>(DynamicSharedMemory());
  const Vectors vectors = {shared + threadIdx.x};
  LoadOperands(params, place, vectors);
  ReplaceByGradients(params, place, vectors);
  const FloatRows<Type> activations = vectors.Rows(kActivations);
  // The tile takes the place of the activations, which all threads have read after the barrier.
  auto& tile = *reinterpret_cast<uint4(*)[kTransposedVectors]>(shared);
  __syncthreads();
  TransposeRows<true>(params.activations, place, activations, tile);
#pragma unroll
  for (int slot : {kGate, kUp}) {
    __syncthreads();
    const FloatRows<Type> rows = vectors.Rows(slot);
    QuantizeRows<true>(params.pre_activation_gradient, place, rows);
    TransposeRows<false>(params.pre_activation_gradient, place, rows, tile);
    place.column += params.activations.columns;
    place.column_block += params.activations.column_blocks;
  }
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* ActivationGradientKernelAddress() {
  return reinterpret_cast<const void*>(QuantizeActivationGradientKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
