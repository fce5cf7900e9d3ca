// Tests what a matmul's roles record for jax_ep.profile, while the checks of another test run:
// JAX_EP_PROFILED_TEST is its file, and JAX_EP_PROFILED_KERNEL what it calls.
#include "ffi/runtime/profile/profile.h"
#include JAX_EP_PROFILED_TEST
#include "ffi/runtime/profile/names.h"
#include "tests/cpp/emulation/profile_tracks.h"

namespace jax_ep::testing {
namespace {

void TestFirstWarps() {
  CHECK_OK(StartProfile({0}, int64_t{1} << 20, false));
  char program[] = "";
  char* arguments[] = {program, nullptr};
  CHECK(RunChecks(1, arguments) == 0);
  std::vector<DeviceProfile> profiles;
  CHECK_OK(StopProfile(&profiles));
  CHECK(profiles.size() == 1 && profiles.front().num_lost == 0);
  std::map<SpanKind, int> counts;
  for (const Track& track : ReadTracks(profiles.front().records)) {
    CHECK(track.num_parts == 3);
    CHECK(track.kernel == JAX_EP_PROFILED_KERNEL);
    CheckSpans(track);
    for (const Span& span : track.spans) ++counts[span.kind];
  }
  using enum SpanKind;
  for (const SpanKind kind : {kLoad, kMultiply, kEpilogue, kWaitTile}) {
    if (counts[kind] == 0) {
      Report(__FILE__, __LINE__, "recorded", kSpanNames[static_cast<int>(kind)].name);
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing

int main() {
  jax_ep::testing::TestFirstWarps();
  return jax_ep::testing::Finish();
}
