// The command line of transfer_test.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_OPTIONS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/device/transfer/hierarchical/low_latency/layout.h"
#include "ffi/runtime/calls/row_format.h"

namespace harness {

// Formats of quantized rows, with a scale per block or one per row.
struct QuantizedFormat {
  const char* name;
  jax_ep::ElementType values, scales;
  bool has_blocks;
};
inline constexpr QuantizedFormat kQuantizedFormats[] = {
    {"block128", jax_ep::kF8E4M3, jax_ep::kF32, true},
    {"row", jax_ep::kF8E5M2, jax_ep::kF32, false},
    {"mxfp8", jax_ep::kF8E4M3, jax_ep::kF8E8M0, true},
    {"mxfp8_e5m2", jax_ep::kF8E5M2, jax_ep::kF8E8M0, true},
    {"mxfp4", jax_ep::kF4E2M1, jax_ep::kF8E8M0, true},
    {"nvfp4", jax_ep::kF4E2M1, jax_ep::kF8E4M3, true},
};

// Uniform routing of T tokens of every rank.
struct TimedShape {
  int tokens;
  int hidden;
  int experts;
  int top_k;
  int num_sms;  // 0: all
};

struct Options {
  int ranks = 0;
  int domain_size = 0;     // ranks per NVLink domain; 0: one domain has all ranks
  int64_t rail_slots = 0;  // as TransferCall's
  bool network = false;    // between domains, instead of loads and stores
  bool shared = false;
  bool tiny = false;
  bool allow_low_latency = true;
  bool counts_arrivals = false;
  const QuantizedFormat* format = nullptr;  // times rows in it; null: bfloat16
  double seconds = 30;
  uint64_t seed = 1;
  std::string only;
  std::vector<TimedShape> shapes;
};

// Returns what the workspaces of a group over several NVLink domains have beside: the rails' rings.
inline int64_t RailBytes(const Options& options) {
  if (options.domain_size == 0) return 0;
  return jax_ep::RailBytes(options.ranks / options.domain_size) +
         jax_ep::DomainEagerBytes(options.ranks);
}

inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_OPTIONS_H_
