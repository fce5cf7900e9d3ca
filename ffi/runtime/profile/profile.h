// Profiles of kernels on the devices of this process (jax_ep.profile).
#ifndef JAX_EP_RUNTIME_PROFILE_PROFILE_H_
#define JAX_EP_RUNTIME_PROFILE_PROFILE_H_

#include <cstdint>
#include <vector>

#include "ffi/device/profile/events.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct DeviceProfile {
  int ordinal = 0;  // the device's
  std::vector<ProfileRecord> records;
  int64_t num_lost = 0;  // spans for which there was no room
};

// Whether the kernels of this build can record.
bool RecordsProfiles();

// Begins to record on devices, after waiting for them. Each gets memory for `max_records`. With
// `all_warps`, all warps record, else the first one of each role of a block.
Status StartProfile(const std::vector<int>& ordinals, int64_t max_records, bool all_warps);

// Waits for the devices, ends the recording, and returns what they have recorded.
Status StopProfile(std::vector<DeviceProfile>* profiles);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_PROFILE_PROFILE_H_
