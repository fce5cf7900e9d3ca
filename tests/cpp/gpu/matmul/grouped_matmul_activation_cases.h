// The test cases of grouped_matmul_activation: kinds of launches, shapes, groups and options.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_CASES_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_CASES_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ffi/runtime/calls/config.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"

namespace harness {

using jax_ep::Activation;

struct FusedKind {
  bool is_gradient;
  Activation activation;
  ElementType type;

  std::string Name() const {
    constexpr const char* kNames[] = {"none", "relu", "relu2", "silu", "gelu", "swiglu", "geglu"};
    return std::string(is_gradient ? "gradient " : "forward ") +
           kNames[static_cast<int>(activation)] + (type == kBF16 ? " bf16" : " f16");
  }
};

inline std::vector<FusedKind> FusedKinds() {
  std::vector<FusedKind> kinds;
  for (bool is_gradient : {false, true}) {
    for (Activation activation :
         {Activation::kNone, Activation::kRelu, Activation::kRelu2, Activation::kSilu,
          Activation::kGelu, Activation::kSwiglu, Activation::kGeglu}) {
      if (is_gradient && activation == Activation::kNone) continue;  // there is no such call
      for (ElementType type : {kBF16, kF16}) kinds.push_back({is_gradient, activation, type});
    }
  }
  return kinds;
}

struct FusedCase {
  int64_t m, k, f;
  Pattern pattern = {};
  bool keeps = false;  // forward only
  bool has_weights = false;
  bool has_bias = false;  // forward only
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  uint64_t seed = 0;
};

inline std::string Describe(const FusedCase& c) {
  char text[256];
  std::snprintf(text, sizeof text,
                "M=%lld K=%lld F=%lld G=%zu %s keeps=%d weights=%d bias=%d num_sms=%lld "
                "tile_counter=%d seed=%llu",
                static_cast<long long>(c.m), static_cast<long long>(c.k),
                static_cast<long long>(c.f), c.pattern.sizes.size(), c.pattern.name.c_str(),
                c.keeps, c.has_weights, c.has_bias, static_cast<long long>(c.num_sms),
                c.tile_counter, static_cast<unsigned long long>(c.seed));
  return text;
}

// Returns case `i` of a kind. 44 consecutive cases have every pair of K and F. Two of them have
// rows that are no multiples of 16 bytes, which the portable kernels take.
inline FusedCase MakeCase(uint64_t seed, int i) {
  constexpr int64_t kF[] = {8, 64, 72, 128, 136, 256, 264};
  // k-blocks of 64, with and without a remainder: fewer than the slices of the previous tile's
  // epilogue, just enough for some activations, and more than enough for all.
  constexpr int64_t kK[] = {64, 72, 128, 512, 1024, 1280};
  constexpr int64_t kM[] = {70, 130, 300, 513};
  constexpr int kGroups[] = {1, 5, 9, 40};
  FusedCase c = {.m = kM[Hash(seed, 1) % 4], .k = kK[i % 44 % 6], .f = kF[i % 44 % 7]};
  if (i % 44 == 42) c.k = 33, c.f = 35;
  if (i % 44 == 43) c.k = 72, c.f = 130;
  int groups = kGroups[Hash(seed, 2) % 4];
  if (c.k * c.f > 1 << 15) groups = std::min(groups, 5);  // for time
  const std::vector<Pattern> patterns = Patterns(c.m, groups);
  c.pattern = patterns[Hash(seed, 3) % patterns.size()];
  const uint32_t options = Hash(seed, 4);
  c.keeps = options % 2 != 0;
  c.has_weights = options / 2 % 2 != 0;
  c.has_bias = options / 4 % 2 != 0;
  // Several tiles per block: only the first is independent of the counter's value.
  constexpr int64_t kNumSms[] = {0, 1, 5};
  c.num_sms = kNumSms[Hash(seed, 5) % 3];
  c.tile_counter = i % 5 == 0 ? -1 : i % 7;
  c.seed = seed;
  return c;
}

inline FusedCase MakeSmallCase(uint64_t seed, int i) {
  constexpr int64_t kShapes[][3] = {{300, 136, 264}, {200, 256, 72}, {130, 64, 136}, {70, 33, 35}};
  const int64_t* const shape = kShapes[(i / 2 + i) % 4];
  constexpr int64_t kNumSms[] = {1, 5, 0};
  return {.m = shape[0],
          .k = shape[1],
          .f = shape[2],
          .pattern = Patterns(shape[0], 4)[i % 4],  // even, ragged, short, half empty
          .keeps = i % 2 == 0,
          .has_weights = i / 2 % 2 == 0,
          .has_bias = i / 4 % 2 == 0,
          .num_sms = kNumSms[i % 3],
          .tile_counter = 0,
          .seed = seed};
}

// Returns cases with tiles of every height, in an odd and in an even number of columns of them, and
// with rows past the last group.
inline std::vector<FusedCase> MakeHeightCases(uint64_t seed, bool is_small) {
  const Pattern every = {"every size", is_small ? std::vector{1, 65, 257} : EverySize(300)};
  const Pattern several = {"several tiles", is_small ? std::vector{530} : SizesOfSeveralTiles()};
  std::vector<FusedCase> cases;
  for (int64_t f : {72, 136}) {  // an activation's tile has 64 or 128 columns
    const bool has_options = f == 136;
    cases.push_back({.m = Sum(every.sizes) + 70,
                     .k = 72,
                     .f = f,
                     .pattern = every,
                     .keeps = has_options,
                     .has_weights = has_options,
                     .has_bias = has_options,
                     .seed = seed});
    // Enough k-blocks for most slices of the previous tile's epilogue.
    cases.push_back({.m = Sum(several.sizes) + 20,
                     .k = is_small ? 72 : 520,
                     .f = f,
                     .pattern = several,
                     .keeps = !has_options,
                     .has_weights = !has_options,
                     .has_bias = !has_options,
                     .num_sms = 8,
                     .seed = seed});
  }
  const Pattern wide = {"wide tiles", {128, 65, 3, 0, 100, 129, 72}};
  for (bool has_options : {false, true}) {
    cases.push_back({.m = Sum(wide.sizes) + 20,
                     .k = is_small ? 72 : 1096,
                     .f = 392,
                     .pattern = wide,
                     .keeps = has_options,
                     .has_weights = has_options,
                     .has_bias = has_options,
                     .num_sms = 2,
                     .seed = seed});
  }
  return cases;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_CASES_H_
