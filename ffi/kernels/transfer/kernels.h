// The kernels of transfers as launches and loading see them.
#ifndef JAX_EP_KERNELS_TRANSFER_KERNELS_H_
#define JAX_EP_KERNELS_TRANSFER_KERNELS_H_

#include <map>
#include <vector>

#include "ffi/runtime/status.h"

namespace jax_ep {

struct TransferKernel {
  const void* address;  // for launches
  int shared_bytes;     // the most dynamic shared memory that a launch has
};

// Lists all kernels, or those that use the network to rail partners.
Status ListTransferKernels(bool only_of_networks, std::vector<TransferKernel>* kernels);

// Loads a kernel on the current device.
Status LoadKernel(const TransferKernel& kernel);

// From now on launches of these kernels launch others instead, which come with a network.
using KernelReplacements = std::map<const void*, const void*>;
void ReplaceKernels(KernelReplacements by);
const void* KernelToLaunch(const void* kernel);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_KERNELS_H_
