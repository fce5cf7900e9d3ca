// The environment's settings: how long a rank waits for a peer. They are read when a generation
// starts.
#ifndef JAX_EP_RUNTIME_SETTINGS_H_
#define JAX_EP_RUNTIME_SETTINGS_H_

#include <cstdint>
#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

struct Settings {
  uint64_t entry_deadline_ns = 600'000'000'000;    // JAX_EP_ENTRY_TIMEOUT_S
  uint64_t progress_deadline_ns = 30'000'000'000;  // JAX_EP_PROGRESS_TIMEOUT_S
  uint64_t warning_ns = 30'000'000'000;            // JAX_EP_WARN_AFTER_S
  uint64_t max_delay_ns = 0;                       // JAX_EP_TEST_DELAY_US
};

// An error names the variable that is not a number.
Status ReadSettings(Settings* settings);

// How processes of other hosts connect with this one. They are read when the first group needs it.
struct NetworkSettings {
  std::string interface_name;  // JAX_EP_NETWORK_INTERFACE; empty: see FindOwnAddress
  uint16_t first_port = 0;     // JAX_EP_NETWORK_PORTS; 0: the system chooses one
  uint16_t last_port = 0;      // included
  uint64_t silence_deadline_ns = 20'000'000'000;  // JAX_EP_NETWORK_TIMEOUT_S
};

Status ReadNetworkSettings(NetworkSettings* settings);

// JAX_EP_NVSHMEM_HEAP_MB: the memory of all rails of a process, where NVSHMEM is the network.
Status ReadNvshmemHeapBytes(uint64_t* bytes);

// Whether JAX_EP_DEBUG is set: groups over processes say what they decide.
bool DebugIsOn();

// JAX_EP_PEER_DEATH_EXIT_S: how long after the death of another process this one may wait for its
// GPUs. Negative if it is "off".
double PeerDeathExitSeconds();

// For tests: whether JAX_EP_TEST_ABSENT_DEVICE names this device, which then makes no call, as if
// its program had none.
bool IsAbsent(int device);

// For tests: whether JAX_EP_TEST_GENERAL is set. It disables the low-latency kernels. It
// must be the same in all processes.
bool LowLatencyIsDisabled();

// For tests: whether JAX_EP_TEST_IPC is set. Then processes share memory by CUDA IPC only. It must
// be the same in all of them.
bool OnlyIpcIsTried();

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_SETTINGS_H_
