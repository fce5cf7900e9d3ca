// The modules of kernels that record profiles. Each source file of kernels is a module on the
// device, and has a variable of its own.
#ifndef JAX_EP_DEVICE_PROFILE_RECORDING_MODULE_H_
#define JAX_EP_DEVICE_PROFILE_RECORDING_MODULE_H_

#include <vector>

namespace jax_ep {

class RecordingModule {
 public:
  // `variable` holds the address of the device's ProfileBuffer, or null.
  template <typename Variable>
  explicit RecordingModule(const Variable& variable) {
    All().push_back(&variable);
  }

  // The modules' variables, as the CUDA runtime knows them.
  static std::vector<const void*>& All() {
    static std::vector<const void*> all;
    return all;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROFILE_RECORDING_MODULE_H_
