// The handlers of each custom call, each defined in the file of its operation.
#ifndef JAX_EP_HANDLERS_OPERATIONS_H_
#define JAX_EP_HANDLERS_OPERATIONS_H_

#include "ffi/handlers/targets.h"

namespace jax_ep {

Target DispatchHandlers();
Target RedispatchHandlers();
Target CombineHandlers();
Target BulkCopyCeilingHandlers();
Target GroupedMatmulHandlers();
Target GroupedMatmulRhsGradientHandlers();
Target GroupedMatmulQuantizedHandlers();
Target GroupedMatmulQuantizedActivationHandlers();
Target GroupedMatmulActivationHandlers();
Target GroupedMatmulActivationGradientHandlers();
Target QuantizeHandlers();
Target QuantizeWeightsHandlers();

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_OPERATIONS_H_
