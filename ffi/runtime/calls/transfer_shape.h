// The sizes of a transfer, read from its buffers and attributes. All but num_rows determine the
// workspace.
#ifndef JAX_EP_RUNTIME_CALLS_TRANSFER_SHAPE_H_
#define JAX_EP_RUNTIME_CALLS_TRANSFER_SHAPE_H_

#include <cstdint>

#include "ffi/runtime/calls/row_format.h"

namespace jax_ep {

struct TransferShape {
  int64_t num_tokens = 0;   // T, of one rank
  int64_t hidden = 0;       // H
  int64_t top_k = 0;        // K
  int64_t num_experts = 0;  // E, of all ranks
  int64_t num_ranks = 0;    // R
  int64_t num_rows = 0;     // M
  int64_t domain_size = 0;  // N, ranks per NVLink domain; 0: one domain has all ranks
  RowFormat format;         // operand, wire and result

  // The bytes of a row of the operand, of the workspace, and of the result. The scales of operands
  // and results are in arrays of their own.
  bool has_domains() const { return domain_size != 0; }
  int64_t operand_bytes() const { return format.payload_bytes(hidden); }
  int64_t wire_bytes() const { return format.wire_bytes(hidden); }
  int64_t result_bytes() const { return format.payload_bytes(hidden); }
  int64_t num_scales() const { return format.num_scales(hidden); }
  int64_t scale_bytes() const { return format.scale_bytes(hidden); }
  int64_t num_scale_words() const { return CeilDivide(scale_bytes(), 4); }
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_TRANSFER_SHAPE_H_
