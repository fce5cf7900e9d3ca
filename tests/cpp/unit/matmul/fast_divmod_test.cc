#include "ffi/device/common/fast_divmod.h"

#include <cstdint>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void Check(int32_t value, int32_t divisor) {
  CHECK(FastDivmod(divisor).Quotient(value) == value / divisor);
  CHECK(FastDivmod(divisor).Remainder(value) == value % divisor);
}

void TestQuotients() {
  for (int64_t divisor = 1; divisor <= INT32_MAX; divisor += divisor / 40 + 1) {
    const auto by = static_cast<int32_t>(divisor);
    for (int64_t value = 0; value <= INT32_MAX; value += value / 9 + 1) {
      Check(static_cast<int32_t>(value), by);
    }
    // Around multiples, where a slightly wrong quotient shows.
    for (int64_t multiple = divisor; multiple <= INT32_MAX; multiple += multiple) {
      for (const int64_t value : {multiple - 1, multiple, multiple + 1}) {
        if (value <= INT32_MAX) Check(static_cast<int32_t>(value), by);
      }
    }
    Check(INT32_MAX, by);
    Check(INT32_MAX - INT32_MAX % by, by);
    Check(INT32_MAX - INT32_MAX % by - 1, by);
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestQuotients();
  return jax_ep::testing::Finish();
}
