// One value for each device of the process, made once and never changed, so that reads take no
// lock.
#ifndef JAX_EP_RUNTIME_PER_DEVICE_H_
#define JAX_EP_RUNTIME_PER_DEVICE_H_

#include <array>
#include <atomic>
#include <memory>

namespace jax_ep {

// GPUs of one process.
inline constexpr int kMaxDevices = 256;

template <typename T>
class PerDevice {
 public:
  PerDevice() = default;
  PerDevice(const PerDevice&) = delete;
  PerDevice& operator=(const PerDevice&) = delete;
  ~PerDevice() {
    for (std::atomic<const T*>& value : values_) delete value.load();
  }

  // Null if the device has none. `device` is a CUDA ordinal.
  const T* Find(int device) const { return values_[device].load(std::memory_order_acquire); }

  // Keeps the first of several values.
  void Set(int device, std::unique_ptr<const T> value) {
    const T* expected = nullptr;
    if (values_[device].compare_exchange_strong(expected, value.get())) {
      static_cast<void>(value.release());
    }
  }

 private:
  std::array<std::atomic<const T*>, kMaxDevices> values_ = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_PER_DEVICE_H_
