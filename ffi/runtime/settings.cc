#include "ffi/runtime/settings.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace jax_ep {
namespace {

constexpr double kMost = 1e9;  // in either unit; keeps the product far below 2^64

bool IsSet(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

// Reads a number of units, which have so many nanoseconds or bytes each.
Status ReadPositive(const char* variable, double unit, uint64_t* result) {
  const char* const text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != '\0' || !(value > 0) || value > kMost) {
    return InvalidArgument("jax_ep: the environment variable ", variable, " is \"", text,
                           "\"; expected a number above 0 and up to ", kMost,
                           ", or nothing for the default");
  }
  *result = static_cast<uint64_t>(std::llround(value * unit));
  return {};
}

// Reads "40000-40100", or one port.
Status ReadPorts(const char* variable, uint16_t* first, uint16_t* last) {
  if (!IsSet(variable)) return {};
  const char* const text = std::getenv(variable);
  const char* const end = text + std::strlen(text);
  std::from_chars_result read = std::from_chars(text, end, *first);
  *last = *first;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
    read = std::from_chars(read.ptr + 1, end, *last);
  }
  if (read.ec == std::errc() && read.ptr == end && 0 < *first && *first <= *last) return {};
  return InvalidArgument("jax_ep: the environment variable ", variable, " is \"", text,
                         "\"; expected a port from 1 to 65535 or a range of them, as 40000-40100, "
                         "or nothing for any port");
}

}  // namespace

Status ReadSettings(Settings* settings) {
  Status status = ReadPositive("JAX_EP_ENTRY_TIMEOUT_S", 1e9, &settings->entry_deadline_ns);
  if (status.ok()) {
    status = ReadPositive("JAX_EP_PROGRESS_TIMEOUT_S", 1e9, &settings->progress_deadline_ns);
  }
  if (status.ok()) status = ReadPositive("JAX_EP_WARN_AFTER_S", 1e9, &settings->warning_ns);
  if (status.ok()) status = ReadPositive("JAX_EP_TEST_DELAY_US", 1e3, &settings->max_delay_ns);
  return status;
}

Status ReadNetworkSettings(NetworkSettings* settings) {
  if (IsSet("JAX_EP_NETWORK_INTERFACE")) {
    settings->interface_name = std::getenv("JAX_EP_NETWORK_INTERFACE");
  }
  Status status = ReadPorts("JAX_EP_NETWORK_PORTS", &settings->first_port, &settings->last_port);
  if (!status.ok()) return status;
  return ReadPositive("JAX_EP_NETWORK_TIMEOUT_S", 1e9, &settings->silence_deadline_ns);
}

Status ReadNvshmemHeapBytes(uint64_t* bytes) {
  *bytes = uint64_t{1} << 30;
  return ReadPositive("JAX_EP_NVSHMEM_HEAP_MB", 1 << 20, bytes);
}

bool OnlyIpcIsTried() { return IsSet("JAX_EP_TEST_IPC"); }

bool DebugIsOn() { return IsSet("JAX_EP_DEBUG"); }

double PeerDeathExitSeconds() {
  constexpr double kDefault = 30;
  const char* const text = std::getenv("JAX_EP_PEER_DEATH_EXIT_S");
  if (text == nullptr || *text == '\0') return kDefault;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  return *end == '\0' ? value : -1;
}

bool IsAbsent(int device) {
  const char* const text = std::getenv("JAX_EP_TEST_ABSENT_DEVICE");
  return text != nullptr && *text != '\0' && std::atoi(text) == device;
}

bool LowLatencyIsDisabled() { return IsSet("JAX_EP_TEST_GENERAL"); }

}  // namespace jax_ep
