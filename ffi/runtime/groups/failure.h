// The messages for the records that a device writes when a call of it fails.
#ifndef JAX_EP_RUNTIME_GROUPS_FAILURE_H_
#define JAX_EP_RUNTIME_GROUPS_FAILURE_H_

#include <string>

#include "ffi/device/protocol/control_block.h"
#include "ffi/runtime/groups/mailbox.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Whether the device has written the record, which is in host memory.
bool IsPosted(const AbortRecord& record);

TimeoutReport ToReport(const AbortRecord& record);

// The warning that is printed while a rank waits for another.
std::string DescribeWaiting(const AbortRecord& record, double seconds);

// The error of every later call after the host has ended the calls of a generation.
Status DescribeHostAbort(const std::string& reason);

// The part of an error's message that tells the cause, for another message.
std::string CauseOf(const std::string& message);

// The error of every later call of this generation. jax_ep.check() raises the same message.
Status Describe(const AbortRecord& record);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_FAILURE_H_
