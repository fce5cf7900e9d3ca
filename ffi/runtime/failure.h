// What a device wrote when it ended a generation, in words.
#ifndef JAX_EP_RUNTIME_FAILURE_H_
#define JAX_EP_RUNTIME_FAILURE_H_

#include <string>

#include "ffi/device/protocol/control_block.h"
#include "ffi/runtime/mailbox.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Whether the device has written the rest of it. Host memory that the device writes.
bool IsPosted(const AbortRecord& record);

TimeoutReport ToReport(const AbortRecord& record);

// What a user is told while a rank waits for another.
std::string DescribeWaiting(const AbortRecord& record, double seconds);

// The error that calls of this generation end with. jax_ep.check() says the same.
Status Describe(const AbortRecord& record);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_FAILURE_H_
