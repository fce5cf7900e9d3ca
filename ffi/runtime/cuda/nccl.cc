#include "ffi/runtime/cuda/nccl.h"

#include <dlfcn.h>

namespace jax_ep {
namespace {

using CommUserRank = int (*)(const void* communicator, int* rank);

}  // namespace

void* FindNcclFunction(const char* name) {
  // Looks among the loaded libraries, then in the global scope, where a plugin may have put it.
  static void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  return dlsym(library != nullptr ? library : RTLD_DEFAULT, name);
}

Status RankIn(void* communicator, int64_t* rank) {
  static const auto comm_user_rank =
      reinterpret_cast<CommUserRank>(FindNcclFunction("ncclCommUserRank"));
  if (comm_user_rank == nullptr) {
    return FailedPrecondition(
        "libnccl.so.2 is not loaded in this process, so a device cannot tell its logical id "
        "in the mesh; install nvidia-nccl of JAX's CUDA version, or set JAX_EP_IMPLEMENTATION=xla");
  }
  int value = 0;
  if (const int error = comm_user_rank(communicator, &value)) {
    return FailedPrecondition("ncclCommUserRank failed with error ", error);
  }
  *rank = value;
  return {};
}

}  // namespace jax_ep
