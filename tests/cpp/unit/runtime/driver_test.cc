#include "ffi/runtime/cuda/driver.h"

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestText() {
  CHECK(CudaVersionText(12040) == "12.4");
  CHECK(CudaVersionText(13000) == "13.0");
  CHECK(CudaVersionText(12080) == "12.8");
}

void TestRecentEnough() {
  CHECK_OK(CheckDriver({.driver = 13000, .runtime = 13000}));
  CHECK_OK(CheckDriver({.driver = 14010, .runtime = 13000}));
  CHECK_OK(CheckDriver({.driver = 13000, .runtime = 12090}));
  // Minor versions are compatible in both directions.
  CHECK_OK(CheckDriver({.driver = 13000, .runtime = 13020}));
  CHECK_OK(CheckDriver({.driver = 12020, .runtime = 12090}));
}

void TestTooOld() {
  const CudaVersions old{.driver = 12040, .runtime = 13000};
  CHECK_FAILS(CheckDriver(old), "supports CUDA 12.4");
  CHECK_FAILS(CheckDriver(old), "needs CUDA 13.0 or newer");
  CHECK_FAILS(CheckDriver(old), "Update the driver or install the +cu12 wheel");
  CHECK(CheckDriver(old).code == StatusCode::kFailedPrecondition);
  const CudaVersions older{.driver = 11080, .runtime = 12090};
  CHECK_FAILS(CheckDriver(older), "supports CUDA 11.8; this build of jax_ep needs CUDA 12.0");
  CHECK(!testing::Contains(CheckDriver(older).message, "wheel"));
}

void TestNoDriver() {
  CHECK_FAILS(CheckDriver({.driver = 0, .runtime = 13000}), "no NVIDIA driver can be loaded");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestText();
  jax_ep::TestRecentEnough();
  jax_ep::TestTooOld();
  jax_ep::TestNoDriver();
  return jax_ep::testing::Finish();
}
