#include "ffi/runtime/network/paced_network.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace jax_ep {

Status ReadPace(Pace* pace) {
  *pace = {};
  const char* const text = std::getenv("JAX_EP_TEST_PACE");
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  pace->gigabytes_per_second = std::strtod(text, &end);
  bool is_right = pace->gigabytes_per_second > 0;
  if (*end == ',') {
    const char* const latency = end + 1;
    pace->latency_us = std::strtod(latency, &end);
    is_right &= end != latency && pace->latency_us >= 0;
  }
  if (is_right && *end == '\0') return {};
  *pace = {};
  return InvalidArgument("jax_ep: the environment variable JAX_EP_TEST_PACE is \"", text,
                         "\"; expected GB/s and microseconds of latency, such as 50,5, or nothing");
}

PacedNetwork::PacedNetwork(std::unique_ptr<Network> network, const Pace& pace)
    : network_(std::move(network)), pace_(pace) {}

Status PacedNetwork::Start(const Put& put) {
  const std::chrono::duration<double> on_wire(static_cast<double>(put.bytes) /
                                              (pace_.gigabytes_per_second * 1e9));
  wire_is_free_ =
      std::max(wire_is_free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(on_wire);
  const std::chrono::duration<double, std::micro> latency(pace_.latency_us);
  waiting_.push_back({put, wire_is_free_ + std::chrono::duration_cast<Clock::duration>(latency)});
  return {};
}

Status PacedNetwork::Progress() {
  while (!waiting_.empty() && waiting_.front().until <= Clock::now()) {
    const Put put = waiting_.front().put;
    waiting_.pop_front();
    if (Status status = network_->Start(put); !status.ok()) return status;
  }
  return network_->Progress();
}

std::string PacedNetwork::Describe(int connection) const {
  return Concatenate(network_->Describe(connection), ", held to ", pace_.gigabytes_per_second,
                     " GB/s with ", pace_.latency_us, " us of latency by JAX_EP_TEST_PACE");
}

}  // namespace jax_ep
