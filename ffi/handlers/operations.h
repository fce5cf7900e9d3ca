// The operations, each defined in its own file: its handlers, the type of its state, its kernels.
#ifndef JAX_EP_HANDLERS_OPERATIONS_H_
#define JAX_EP_HANDLERS_OPERATIONS_H_

#include <cstdint>

#include "ffi/handlers/targets.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct Handlers {
  Target target;
  StateType state;           // operations may share it
  Status (*load_kernels)();  // on the current device; operations may share it
  bool communicates = false;
};

Handlers DispatchHandlers();
Handlers RedispatchHandlers();
Handlers CombineHandlers();
Handlers DispatchStartHandlers();
Handlers RedispatchStartHandlers();
Handlers CombineStartHandlers();
Handlers TransferDoneHandlers();
Handlers BulkCopyCeilingHandlers();
Handlers GroupedMatmulHandlers();
Handlers GroupedMatmulRhsGradientHandlers();
Handlers GroupedMatmulQuantizedHandlers();
Handlers GroupedMatmulMxFp4Handlers();
Handlers GroupedMatmulMxFp4ActivationHandlers();
Handlers GroupedMatmulMxFp4LhsGradientHandlers();
Handlers GroupedMatmulQuantizedActivationHandlers();
Handlers GroupedMatmulQuantizedRhsGradientHandlers();
Handlers GroupedMatmulActivationHandlers();
Handlers GroupedMatmulActivationGradientHandlers();
Handlers QuantizeHandlers();
Handlers QuantizeWeightsHandlers();
Handlers QuantizeTransposedHandlers();
Handlers QuantizeBothHandlers();
Handlers QuantizeActivationGradientHandlers();

// All operations of this build.
inline constexpr Handlers (*kAllHandlers[])() = {DispatchHandlers,
                                                 RedispatchHandlers,
                                                 CombineHandlers,
                                                 DispatchStartHandlers,
                                                 RedispatchStartHandlers,
                                                 CombineStartHandlers,
                                                 TransferDoneHandlers,
                                                 BulkCopyCeilingHandlers,
                                                 GroupedMatmulHandlers,
                                                 GroupedMatmulRhsGradientHandlers,
                                                 GroupedMatmulQuantizedHandlers,
                                                 GroupedMatmulMxFp4Handlers,
                                                 GroupedMatmulMxFp4ActivationHandlers,
                                                 GroupedMatmulMxFp4LhsGradientHandlers,
                                                 GroupedMatmulQuantizedActivationHandlers,
                                                 GroupedMatmulQuantizedRhsGradientHandlers,
                                                 GroupedMatmulActivationHandlers,
                                                 GroupedMatmulActivationGradientHandlers,
                                                 QuantizeHandlers,
                                                 QuantizeWeightsHandlers,
                                                 QuantizeTransposedHandlers,
                                                 QuantizeBothHandlers,
                                                 QuantizeActivationGradientHandlers};

// Loads the kernels of all operations that do not communicate on a device. Later calls return at
// once: loading at every execution would cost as much as a small matmul.
Status LoadLocalKernelsOnce(int32_t device);

// Loads all kernels of this build on the current device.
Status LoadAllKernels();

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_OPERATIONS_H_
