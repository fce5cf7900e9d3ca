// The shape of a call, its random inputs, and messages about differences.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_RANDOM_INPUTS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_RANDOM_INPUTS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "ffi/device/transfer/dispatch/token_params.h"
#include "ffi/runtime/calls/transfer_shape.h"
#include "tests/cpp/gpu/transfer/contract.h"
#include "tests/cpp/gpu/transfer/transfer_options.h"

namespace harness {

using Random = std::mt19937_64;

inline int Uniform(Random& random, int least, int most) {
  return least + static_cast<int>(random() % static_cast<uint64_t>(most - least + 1));
}
inline int Pick(Random& random, std::initializer_list<int> values) {
  return values.begin()[random() % values.size()];
}

inline int failures = 0;

inline void Fail(const std::string& text) {
  if (++failures <= 20) std::printf("FAIL %s\n", text.c_str());
  std::fflush(stdout);
}

template <typename T>
void Expect(const char* what, int rank, const std::vector<T>& got, const std::vector<T>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0) continue;
    return Fail(jax_ep::Concatenate(what, " of rank ", rank, " at ", i, " of ", want.size(),
                                    ": is ", +got[i], ", expected ", +want[i]));
  }
}

inline bool AllNan(const Bytes& data, ElementType type) {
  const size_t bytes = std::max<int64_t>(jax_ep::ElementBytes(type), 1);
  for (size_t i = 0; i < data.size() / bytes; ++i) {
    if (!std::isnan(ReadElement(data, i, type))) return false;
  }
  return true;
}

struct Shape {
  Routing routing;  // without ids
  int hidden = 8;
  ElementType type = jax_ep::kBF16;
  bool has_weights = true;
  bool has_scalars = true;  // combine
  bool zero_tail = true;
  int num_sms = 0;
  bool has_own_num_sms = false;  // a different number on each rank
  bool allow_low_latency = true;
  int64_t ring_chunks = 0;
  int64_t rail_slots = 0;        // as TransferCall's; the same in all calls of a group
  int64_t chunk_tokens = 0;      // as TransferCall's: with few, calls have many chunks
  bool counts_arrivals = false;  // dispatches
  int num_scales = 0;            // quantized rows have them
  ElementType scale_type = jax_ep::kF32;

  int64_t num_arrivals() const {
    return 1 + jax_ep::CeilDivide(int64_t{routing.rows}, jax_ep::kArrivalRows);
  }
  int64_t row_bytes() const { return format().payload_bytes(hidden); }
  int64_t scale_bytes() const { return num_scales * jax_ep::ElementBytes(scale_type); }

  jax_ep::RowFormat format() const {
    if (num_scales == 0) return {.payload = type};
    const int64_t block = jax_ep::ValuesPerScale(scale_type);
    const int64_t blocks = jax_ep::CeilDivide(int64_t{hidden}, block);
    return jax_ep::QuantizedRowFormat(type, blocks * block / num_scales, scale_type);
  }

  jax_ep::TransferShape transfer_shape() const {
    return {.num_tokens = routing.tokens,
            .hidden = hidden,
            .top_k = routing.top_k,
            .num_experts = routing.experts,
            .num_ranks = routing.ranks,
            .num_rows = routing.rows,
            .domain_size = routing.domain_size,
            .format = format()};
  }

  // Makes rows quantized.
  void Quantize(const QuantizedFormat& format) {
    type = format.values;
    scale_type = format.scales;
    const int64_t block = format.has_blocks ? jax_ep::ValuesPerScale(scale_type) : hidden;
    num_scales = static_cast<int>(jax_ep::CeilDivide(int64_t{hidden}, block));
  }
};

inline Bytes RandomBytes(Random& random, int64_t count) {
  Bytes data(count);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  return data;
}

inline Bytes RandomRows(Random& random, int64_t rows, const Shape& shape) {
  Bytes data(rows * shape.row_bytes());
  if (shape.num_scales > 0) return RandomBytes(random, rows * shape.row_bytes());
  for (int64_t i = 0; i < rows * shape.hidden; ++i) {
    WriteElement(data, i, shape.type, static_cast<float>(Uniform(random, -4000, 4000)) / 1024.0f);
  }
  return data;
}

inline std::vector<float> RandomFloats(Random& random, int64_t count) {
  std::vector<float> data(count);
  for (float& value : data) value = static_cast<float>(Uniform(random, -999, 999)) / 700.0f;
  return data;
}

// Ids with all special cases of the contract.
inline std::vector<std::vector<int32_t>> RandomIds(Random& random, const Routing& routing) {
  std::vector<std::vector<int32_t>> ids(routing.ranks);
  const int kind = Uniform(random, 0, 9);
  const int favorite = Uniform(random, 0, routing.experts - 1);
  const int favorite_rank = Uniform(random, 0, routing.ranks - 1);
  const int empty_rank = Uniform(random, 0, 3) == 0 ? Uniform(random, 0, routing.ranks - 1) : -1;
  for (int r = 0; r < routing.ranks; ++r) {
    for (int c = 0; c < routing.tokens * routing.top_k; ++c) {
      int id = Uniform(random, 0, routing.experts - 1);  // may repeat within a token
      if (kind == 1) id = favorite;
      if (kind == 2) id = favorite_rank * routing.local() + id % routing.local();
      if (kind == 3) id = -1;
      if (kind == 4 && Uniform(random, 0, 2) == 0) id = -1;
      if (kind == 5 && Uniform(random, 0, 3) == 0) id = Pick(random, {-2, -7, 1 << 30, INT32_MIN});
      if (kind == 5 && Uniform(random, 0, 9) == 0) id = routing.experts;
      if (kind == 6 && Uniform(random, 0, 1) == 0) id = favorite;
      if (kind == 7) id = (c % routing.top_k + r) % routing.experts;
      if (r == empty_rank) id = -1;
      ids[r].push_back(id);
    }
  }
  return ids;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_RANDOM_INPUTS_H_
