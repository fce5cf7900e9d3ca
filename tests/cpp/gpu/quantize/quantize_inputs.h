// What the tests of quantizing share: numbers rounded to a type, a stream, and the count of cases.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_INPUTS_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_INPUTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "ffi/runtime/calls/buffers.h"
#include "tests/cpp/gpu/numbers.h"
#include "tests/cpp/gpu/require.h"

namespace harness {

inline const char* TypeName(jax_ep::ElementType type) {
  return type == jax_ep::kF32 ? "f32" : type == jax_ep::kBF16 ? "bf16" : "f16";
}

// Rounds numbers to the type of x, in place, and returns their bytes.
inline std::vector<uint8_t> Round(jax_ep::ElementType type, std::vector<float>* numbers) {
  std::vector<uint8_t> bytes(numbers->size() * jax_ep::ElementBytes(type));
  for (size_t i = 0; i < numbers->size(); ++i) {
    float& number = (*numbers)[i];
    if (type == jax_ep::kF32) {
      std::memcpy(&bytes[4 * i], &number, 4);
      continue;
    }
    const uint16_t bits = type == jax_ep::kBF16 ? ToBFloat16(number) : ToFloat16(number);
    number = type == jax_ep::kBF16 ? FromBFloat16(bits) : FromFloat16(bits);
    std::memcpy(&bytes[2 * i], &bits, 2);
  }
  return bytes;
}

inline cudaStream_t Stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t created;
    Require(cudaStreamCreateWithFlags(&created, 0), "a stream");
    return created;
  }();
  return stream;
}

inline int failures = 0;

// Counts cases, and prints the first that fail.
class CaseCount {
 public:
  // A case without a problem has passed.
  void Add(const std::string& name, const std::string& problem) {
    ++cases_;
    if (problem.empty() || failed_++ >= 10) return;
    std::printf("FAIL %s: %s\n", name.c_str(), problem.c_str());
  }

  void Finish(const char* operation) const {
    std::printf("%s %s: %d of %d cases\n", failed_ == 0 ? "PASS" : "FAIL", operation,
                cases_ - failed_, cases_);
    failures += failed_;
  }

 private:
  int cases_ = 0;
  int failed_ = 0;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_INPUTS_H_
