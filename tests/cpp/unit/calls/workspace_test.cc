#include "ffi/runtime/calls/workspace.h"

#include <limits>
#include <string_view>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr TransferShape kLarge{.num_tokens = 4096,
                               .hidden = 7168,
                               .top_k = 8,
                               .num_experts = 256,
                               .num_ranks = 4,
                               .format = kBFloat16Rows};

int64_t BytesOf(const TransferShape& shape, std::string_view name) {
  WorkspaceLayout layout;
  CHECK_OK(PlanWorkspace(shape, &layout));
  for (const WorkspaceBuffer& buffer : layout.buffers) {
    if (buffer.name == name) return buffer.bytes;
  }
  CHECK(!"there is a buffer of this name");
  return -1;
}

template <typename Change>
TransferShape With(const Change& change) {
  TransferShape shape = kLarge;
  change(shape);
  return shape;
}

template <typename Change>
Status Refused(const Change& change) {
  WorkspaceLayout layout;
  return PlanWorkspace(With(change), &layout);
}

void TestLayout() {
  WorkspaceLayout layout;
  CHECK_OK(PlanWorkspace(kLarge, &layout));
  CHECK(layout.bytes < kGiB);
  int64_t end = 0;
  for (const WorkspaceBuffer& buffer : layout.buffers) {
    CHECK(buffer.offset == end);
    CHECK(buffer.offset % kWorkspaceAlignment == 0 && buffer.bytes % kWorkspaceAlignment == 0);
    end = buffer.offset + buffer.bytes;
  }
  CHECK(end == layout.bytes);
}

// Calls of all shapes use these double buffers in turn: no other buffer may ever overlap them.
void TestEagerBuffersDoNotDependOnTheShape() {
  WorkspaceLayout large;
  WorkspaceLayout tiny;
  CHECK_OK(PlanWorkspace(kLarge, &large));
  CHECK_OK(PlanWorkspace({.num_tokens = 1,
                          .hidden = 8,
                          .top_k = 1,
                          .num_experts = 1,
                          .num_ranks = 1,
                          .format = kBFloat16Rows},
                         &tiny));
  for (const WorkspaceBufferId buffer : {kEagerRows, kEagerPackets, kEagerFlags}) {
    CHECK(large.buffers[buffer].offset == tiny.buffers[buffer].offset);
    CHECK(large.buffers[buffer].bytes == tiny.buffers[buffer].bytes);
  }
}

// Nor do the rails' rings, in a group over several NVLink domains.
void TestRailsDoNotDependOnTheShape() {
  const TransferShape wide = With([](TransferShape& s) { s.num_ranks = 64, s.domain_size = 8; });
  TransferShape tiny_shape = wide;
  tiny_shape.num_tokens = 0;
  tiny_shape.hidden = tiny_shape.top_k = 1;
  tiny_shape.num_experts = 64;
  WorkspaceLayout large, tiny, one_level;
  CHECK_OK(PlanWorkspace(wide, &large));
  CHECK_OK(PlanWorkspace(tiny_shape, &tiny));
  CHECK_OK(PlanWorkspace(kLarge, &one_level));
  CHECK(large.bytes < kGiB);
  CHECK(large.rails.offset == tiny.rails.offset && large.rails.bytes == tiny.rails.bytes);
  CHECK(large.rails.bytes == 2 * 7 * RailSlots(8) * kRailSlotBytes + DomainEagerBytes(64));
  const WorkspaceBuffer& before = large.buffers[kEagerFlags];
  CHECK(large.rails.offset == before.offset + before.bytes);
  CHECK(large.buffers[kReceivedRows].offset == large.rails.offset + large.rails.bytes);
  CHECK(one_level.rails.bytes == 0);
}

void TestDomainsDoNotOverlap() {
  for (const int64_t domain_size : {1, 2, 8, 32}) {
    WorkspaceLayout layout;
    CHECK_OK(PlanWorkspace(
        With([&](TransferShape& s) { s.num_ranks = 64, s.domain_size = domain_size; }), &layout));
    CHECK(layout.bytes <= kGiB);
    int64_t end = 0;
    for (const WorkspaceBuffer& buffer : layout.buffers) {
      CHECK(buffer.offset == end);
      end = buffer.offset + buffer.bytes;
      if (end != layout.rails.offset) continue;
      CHECK(end % kWorkspaceAlignment == 0 && layout.rails.bytes > 0);
      end += layout.rails.bytes;
    }
    CHECK(end == layout.bytes);
  }
}

// These are not mistakes: the calls run in pure JAX.
void TestUnimplementedDomains() {
  const auto check = [](const auto& change, const char* why) {
    const Status status = Refused([&](TransferShape& s) {
      s.num_ranks = 64, s.domain_size = 8;
      change(s);
    });
    CHECK(status.code == StatusCode::kUnimplemented);
    CHECK_FAILS(status, why);
  };
  check([](TransferShape& s) { s.hidden = 1 << 18; }, "a row of 524288 bytes");
  check([](TransferShape& s) { s.num_tokens = 1 << 20; }, "1048576 tokens per rank");
  check([](TransferShape& s) { s.num_ranks = 128, s.domain_size = 1; },
        "there are 128 NVLink domains; the kernels take up to 64");
}

void TestBuffers() {
  CHECK(BytesOf(kLarge, "received_rows") == int64_t{4096} * 4 * 7168 * 2);  // min(K, R) is R
  CHECK(
      BytesOf(With([](TransferShape& s) { s.top_k = 2, s.num_tokens = 8192; }), "received_rows") ==
      int64_t{8192} * 2 * 7168 * 2);  // the receive rings of a dispatch fit into it
  CHECK(BytesOf(kLarge, "routes") == 4 * 4096 * 8 * 8);
  CHECK(BytesOf(kLarge, "received_weights") == 4 * 4096 * 8 * 4);
  CHECK(BytesOf(kLarge, "assignment_scalars") == 4096 * 8 * 4);
  CHECK(BytesOf(kLarge, "tile_counts") == 128 * 258 * 4);
  CHECK(BytesOf(kLarge, "assignment_rows") == 4 * 4096 * 8 * 4);
  // Rows are padded to the unit of bulk copies.
  CHECK(BytesOf(With([](TransferShape& s) { s.hidden = 1, s.num_tokens = 1024; }),
                "received_rows") == 1024 * 4 * 16);
}

// A token has one partial sum from each rank that it was sent to, for any number of experts:
// O(min(K, R)*T*H), which is nearly the whole workspace.
void TestTokensArriveOnce() {
  const int64_t rows = BytesOf(kLarge, "received_rows");
  CHECK(rows == BytesOf(With([](TransferShape& s) { s.num_experts = 1024; }), "received_rows"));
  CHECK(rows == BytesOf(With([](TransferShape& s) { s.top_k = 32; }), "received_rows"));
  CHECK(2 * rows == BytesOf(With([](TransferShape& s) { s.num_tokens *= 2; }), "received_rows"));
  const TransferShape wide = With([](TransferShape& s) { s.num_ranks = 64, s.num_experts = 1024; });
  const int64_t wide_rows = BytesOf(wide, "received_rows");
  CHECK(wide_rows == int64_t{8} * 4096 * 7168 * 2);
  WorkspaceLayout layout;
  CHECK_OK(PlanWorkspace(wide, &layout));
  CHECK(layout.bytes < wide_rows + wide_rows / 8);
}

void TestEdges() {
  CHECK(BytesOf(With([](TransferShape& s) { s.num_tokens = 0; }), "received_rows") == 0);
  // A combine has a partial sum of each token, also on one rank.
  CHECK(BytesOf(With([](TransferShape& s) { s.num_ranks = 1; }), "received_rows") ==
        4096 * 7168 * 2);
}

// The rows of the workspace are those of the wire: payload and scales, aligned.
void TestRowFormat() {
  CHECK(kLarge.operand_bytes() == 14336 && kLarge.wire_bytes() == 14336);
  const RowFormat scaled = {.payload = kBF16, .scales = kF32, .values_per_scale = 128};
  CHECK(scaled.payload_bytes(7168) == 14336 && scaled.scale_bytes(7168) == 4 * 56);
  CHECK(scaled.wire_bytes(7168) == 14336 + 224);
  CHECK(scaled.scale_bytes(7169) == 4 * 57);
  CHECK(scaled.wire_bytes(7169) == 14576);  // 14338 + 228 rounded up to 16
  const TransferShape one_rank =
      With([&](TransferShape& s) { s.format = scaled, s.num_ranks = 1; });
  CHECK(BytesOf(one_rank, "received_rows") == 4096 * (14336 + 224));
}

// MXFP8 rows: a scale of one byte for every 32 values. Two values of four bits share a byte.
void TestScalesOfOtherTypes() {
  constexpr RowFormat kMx = QuantizedRowFormat(kF8E4M3, 32, kF8E8M0);
  constexpr RowFormat kNv = QuantizedRowFormat(kF4E2M1, 16, kF8E4M3);
  static_assert(IsMoved(kMx) && IsMoved(kNv) && IsMoved(QuantizedRowFormat(kF4E2M1, 32, kF8E8M0)));
  static_assert(!IsMoved(QuantizedRowFormat(kF8E4M3, 16, kF8E4M3)));
  static_assert(!IsMoved(QuantizedRowFormat(kF4E2M1, 32, kF8E4M3)));
  static_assert(!IsMoved(QuantizedRowFormat(kF8E4M3, 16, kF8E8M0)));
  static_assert(!IsMoved(QuantizedRowFormat(kF4E2M1, 128)));
  static_assert(IsMoved(QuantizedRowFormat(kF8E4M3, 128)) && IsMoved(kBFloat16Rows));
  static_assert(!IsMoved(QuantizedRowFormat(kF8E4M3, 32)) && !IsMoved(RowFormat{}));
  CHECK(kMx.num_scales(7168) == 224 && kMx.scale_bytes(7168) == 224);
  CHECK(kMx.payload_bytes(7168) == 7168 && kMx.wire_bytes(7168) == 7168 + 224);
  CHECK(kMx.wire_bytes(2880) == 2976);  // 2880 + 90 rounded up to 16
  CHECK(kNv.payload_bytes(7168) == 3584 && kNv.scale_bytes(7168) == 448);
  CHECK(kNv.wire_bytes(7168) == 3584 + 448 && kNv.wire_bytes(2880) == 1632);  // 1440 + 180
}

void TestRefused() {
  CHECK_FAILS(Refused([](TransferShape& s) { s.num_tokens = -1; }), "num_tokens is -1");
  CHECK_FAILS(Refused([](TransferShape& s) { s.hidden = 0; }), "hidden is 0");
  CHECK_FAILS(Refused([](TransferShape& s) { s.top_k = 0; }), "top_k is 0");
  CHECK_FAILS(Refused([](TransferShape& s) { s.num_ranks = 257; }), "num_ranks is 257");
  CHECK_FAILS(Refused([](TransferShape& s) { s.num_ranks = 3; }), "multiple of num_ranks");
  CHECK_FAILS(Refused([](TransferShape& s) { s.format = {}; }), "row element");
  CHECK_FAILS(Refused([](TransferShape& s) { s.num_tokens = kHuge; }), "num_tokens is");
  CHECK_FAILS(Refused([](TransferShape& s) { s.hidden = kHuge; }), "hidden is");
  CHECK_FAILS(Refused([](TransferShape& s) { s.hidden = kMaxWorkspaceBytes; }), "too large");
  CHECK_FAILS(Refused([](TransferShape& s) { s.num_tokens = s.top_k = 1 << 20; }), "has 32 bits");
  CHECK_FAILS(
      Refused([](TransferShape& s) { s.num_tokens = 1 << 28, s.hidden = 1 << 20, s.top_k = 1; }),
      "16 TiB");
  CHECK_FAILS(Refused([](TransferShape& s) { s.domain_size = 3; }), "domain_size is 3");
  CHECK_FAILS(Refused([](TransferShape& s) { s.domain_size = 4; }), "and less than it");
  CHECK_FAILS(Refused([](TransferShape& s) { s.domain_size = -1; }), "domain_size is -1");
  CHECK_FAILS(Refused([](TransferShape& s) { s.domain_size = 2, s.hidden = 200'000; }),
              "400000 bytes");
  // Each buffer fits in 16 TiB, but not all of them.
  CHECK_FAILS(Refused([](TransferShape& s) {
                s.num_tokens = 1 << 20, s.hidden = 1 << 23, s.top_k = 1, s.num_ranks = 1;
              }),
              "16 TiB");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestLayout();
  jax_ep::TestBuffers();
  jax_ep::TestEagerBuffersDoNotDependOnTheShape();
  jax_ep::TestRailsDoNotDependOnTheShape();
  jax_ep::TestDomainsDoNotOverlap();
  jax_ep::TestUnimplementedDomains();
  jax_ep::TestTokensArriveOnce();
  jax_ep::TestEdges();
  jax_ep::TestRowFormat();
  jax_ep::TestScalesOfOtherTypes();
  jax_ep::TestRefused();
  return jax_ep::testing::Finish();
}
