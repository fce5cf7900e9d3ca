#include "ffi/runtime/cuda/driver.h"

namespace jax_ep {

std::string CudaVersionText(int version) {
  return Concatenate(version / 1000, ".", version % 1000 / 10);
}

Status CheckDriver(const CudaVersions& versions) {
  const int major = versions.runtime / 1000;
  const std::string needed = CudaVersionText(major * 1000);
  if (versions.driver == 0) {
    return FailedPrecondition(
        "no NVIDIA driver can be loaded; this build of jax_ep needs one for CUDA ", needed,
        " or newer");
  }
  if (versions.driver / 1000 >= major) return {};
  const int driver_major = versions.driver / 1000;
  return FailedPrecondition(
      "the NVIDIA driver supports CUDA ", CudaVersionText(versions.driver),
      "; this build of jax_ep needs CUDA ", needed, " or newer. Update the driver",
      driver_major >= 12 ? Concatenate(" or install the +cu", driver_major, " wheel") : "");
}

}  // namespace jax_ep
