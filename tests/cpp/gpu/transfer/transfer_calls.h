// Calls with the addresses of their buffers, prepared and launched at once.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_CALLS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_CALLS_H_

#include "ffi/kernels/transfer/launch.h"

namespace harness {

template <typename Buffers>
struct Call : Buffers {
  jax_ep::TransferCall transfer;
  jax_ep::ControlBlock* control = nullptr;
};
using DispatchCall = Call<jax_ep::DispatchBuffers>;
using RedispatchCall = Call<jax_ep::RedispatchBuffers>;
using CombineCall = Call<jax_ep::CombineBuffers>;
using BulkCopyCeilingCall = Call<jax_ep::BulkCopyCeilingBuffers>;

template <typename Prepared, typename Buffers>
jax_ep::Status PrepareAndLaunch(jax_ep::Status (*prepare)(const jax_ep::TransferCall&, Prepared*),
                                const Call<Buffers>& call, cudaStream_t stream) {
  Prepared prepared;
  jax_ep::Status status = prepare(call.transfer, &prepared);
  const Buffers& buffers = call;
  return status.ok() ? jax_ep::Launch(prepared, call.control, buffers, stream) : status;
}

inline jax_ep::Status LaunchDispatch(const DispatchCall& call, cudaStream_t stream) {
  return PrepareAndLaunch(jax_ep::PrepareDispatch, call, stream);
}

inline jax_ep::Status LaunchRedispatch(const RedispatchCall& call, cudaStream_t stream) {
  return PrepareAndLaunch(jax_ep::PrepareRedispatch, call, stream);
}

inline jax_ep::Status LaunchCombine(const CombineCall& call, cudaStream_t stream) {
  return PrepareAndLaunch(jax_ep::PrepareCombine, call, stream);
}

inline jax_ep::Status LaunchBulkCopyCeiling(const BulkCopyCeilingCall& call, cudaStream_t stream) {
  return PrepareAndLaunch(jax_ep::PrepareBulkCopyCeiling, call, stream);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_CALLS_H_
