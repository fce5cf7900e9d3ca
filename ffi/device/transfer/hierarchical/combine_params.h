// The parameters of a combine over several NVLink domains.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_PARAMS_H_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_PARAMS_H_

#include "ffi/device/transfer/combine/params.h"
#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {

struct HierarchicalCombineParams {
  CombineParams combine;  // its plan.partial_sum_index is that in the domain
  ForwardingOperands forwarding;
  HierarchicalLayout layout;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_PARAMS_H_
