// Calls of more tokens than the receive rings have slots.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_MANY_TOKENS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_MANY_TOKENS_H_

#include <algorithm>
#include <string>

#include "ffi/device/transfer/dispatch/token_chunks.h"
#include "ffi/runtime/calls/workspace.h"
#include "tests/cpp/gpu/transfer/call_sequence.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

// Returns the chunks of a rank's tokens and those that the rings have slots for.
inline std::string DescribeRings(const jax_ep::TransferShape& shape, const Options& options) {
  if (shape.has_domains()) {
    jax_ep::HierarchicalLayout layout;
    STATUS_OK(jax_ep::PlanHierarchicalLayout(shape, options.rail_slots, 0, 0, &layout));
    if (layout.num_chunks <= std::max(layout.domain_slots, layout.rail_slots)) {
      Fail("there are slots for all tokens");
    }
    return jax_ep::Concatenate(layout.num_chunks, " chunks of ", layout.chunk_tokens,
                               ", slots for ", layout.domain_slots, ", in rails for ",
                               layout.rail_slots);
  }
  const jax_ep::TokenChunks chunks =
      jax_ep::PlanTokenChunks(shape.num_tokens, shape.wire_bytes(), shape.num_ranks, shape.top_k);
  if (shape.num_ranks >= 4 && chunks.ring_slots == shape.num_tokens) {
    Fail("there are slots for all tokens");
  }
  return jax_ep::Concatenate(chunks.num_chunks, " chunks of ", chunks.tokens, ", slots for ",
                             chunks.ring_chunks);
}

// More tokens than the receive rings have slots: from four ranks on, or with several domains.
inline void TestManyTokens(const Options& options) {
  Random random(options.seed + 250);
  const int before = failures;
  Shape shape;
  Routing& sizes = shape.routing;
  sizes = {.tokens = 16384,
           .top_k = 1,
           .experts = 4 * options.ranks,
           .ranks = options.ranks,
           .rows = 16384 * 5 / 4,
           .align = 1,
           .domain_size = options.domain_size,
           .ids = {}};
  shape.hidden = 2048;
  shape.rail_slots = options.rail_slots;
  shape.num_sms = options.shared ? 2 : 0;
  jax_ep::WorkspaceLayout layout;
  const jax_ep::TransferShape transfer = shape.transfer_shape();
  STATUS_OK(jax_ep::PlanWorkspace(transfer, &layout));
  const std::string rings = DescribeRings(transfer, options);
  Group group(options.ranks, options.shared, layout.bytes, size_t{1} << 30);
  group.ResetArenas(0xff);
  Sequence calls(&group, &random);
  const auto dispatched = calls.AddDispatch(shape);
  calls.AddCombine(dispatched, shape);
  calls.AddRedispatch(dispatched, shape);
  calls.Fill();
  for (int i = 0; i < 20; ++i) calls.LaunchAll();
  calls.Check();
  std::printf("%s many tokens: %s\n", failures == before ? "PASS" : "FAIL", rings.c_str());
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_TRANSFER_MANY_TOKENS_H_
