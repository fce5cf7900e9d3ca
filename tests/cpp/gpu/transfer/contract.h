// The contract of dispatch and combine, written with plain loops on the host.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_CONTRACT_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_CONTRACT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ffi/runtime/calls/buffers.h"
#include "tests/cpp/gpu/numbers.h"

namespace harness {

using jax_ep::ElementType;
using Bytes = std::vector<uint8_t>;

inline float ReadElement(const Bytes& data, int64_t i, ElementType type) {
  // An eight-bit value is only asked whether it is NaN, and so are two of four bits, which have
  // none but should have all bits then.
  if (type == jax_ep::kF8E8M0 || type == jax_ep::kF4E2M1) return data[i] == 0xff ? NAN : 0;
  if (jax_ep::ElementBytes(type) == 1) return (data[i] & 0x7f) == 0x7f ? NAN : 0;
  if (type == jax_ep::kF32) {
    float value;
    std::memcpy(&value, &data[i * 4], 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, &data[i * 2], 2);
  return type == jax_ep::kF16 ? FromFloat16(bits) : FromBFloat16(bits);
}

inline float RoundTo(float value, ElementType type) {
  if (type == jax_ep::kF32) return value;
  if (type == jax_ep::kF16) return FromFloat16(ToFloat16(value));
  return FromBFloat16(ToBFloat16(value));
}

// The bits of one.
inline uint8_t EightBitOne(ElementType type) { return type == jax_ep::kF8E8M0 ? 0x7f : 0x38; }

inline void WriteElement(Bytes& data, int64_t i, ElementType type, float value) {
  if (type == jax_ep::kF32) {
    std::memcpy(&data[i * 4], &value, 4);
    return;
  }
  const uint16_t bits = type == jax_ep::kF16 ? ToFloat16(value) : ToBFloat16(value);
  std::memcpy(&data[i * 2], &bits, 2);
}

struct Routing {
  int tokens, top_k, experts, ranks, rows, align;
  int domain_size = 0;                    // ranks per NVLink domain; 0: one domain has all ranks
  std::vector<std::vector<int32_t>> ids;  // indexed by rank: [T * K]

  int local() const { return experts / ranks; }
  int num_domains() const { return domain_size == 0 ? 0 : ranks / domain_size; }
  int domain_words() const { return (domain_size + 31) / 32; }
  int64_t num_token_ranks() const { return int64_t{num_domains()} * tokens * domain_words(); }
};

struct HostPlan {
  std::vector<int32_t> group_sizes, real_group_sizes, row_offsets, row_source, partial_sum_index;
  std::vector<uint8_t> kept;
  std::vector<int32_t> destination;
  int32_t num_received = 0, num_dropped = 0, num_bad_ids = 0, status = 0;
  // See ForwardingResults; empty if there is one domain.
  std::vector<uint32_t> token_ranks;
  std::vector<int32_t> domain_partial_sum_index;
};

// Returns each expert's quota, from counts[e][s].
inline std::vector<int> Quotas(const Routing& routing,
                               const std::vector<std::vector<int>>& counts) {
  const int local = routing.local();
  std::vector<int> quotas(routing.experts);
  for (int rank = 0; rank < routing.ranks; ++rank) {
    std::vector<int64_t> demand(local);
    for (int e = 0; e < local; ++e) {
      for (int n : counts[rank * local + e]) demand[e] += n;
    }
    int64_t cap = local ? *std::max_element(demand.begin(), demand.end()) : 0;
    while (true) {
      int64_t rows = 0;
      for (int64_t n : demand) {
        rows += (std::min(n, cap) + routing.align - 1) / routing.align * routing.align;
      }
      if (rows <= routing.rows) break;
      --cap;
    }
    for (int e = 0; e < local; ++e) {
      const std::vector<int>& n = counts[rank * local + e];
      int quota = *std::max_element(n.begin(), n.end());
      while (true) {
        int64_t rows = 0;
        for (int value : n) rows += std::min(value, quota);
        if (rows <= std::min(demand[e], cap)) break;
        --quota;
      }
      quotas[rank * local + e] = quota;
    }
  }
  return quotas;
}

// Returns whether a rank's token is sent to another rank, or to itself.
inline bool IsSent(const Routing& routing, const HostPlan& source, int token, int to) {
  const auto begin = source.destination.begin() + token * routing.top_k;
  return std::find(begin, begin + routing.top_k, to) != begin + routing.top_k;
}

// Adds what the plan of rank r has beside, if there are several domains.
inline void AddForwarding(const Routing& routing, int r, std::vector<HostPlan>* plans) {
  if (routing.domain_size == 0) return;
  HostPlan& plan = (*plans)[r];
  const int size = routing.domain_size, first = r / size * size;
  plan.token_ranks.resize(routing.num_token_ranks());
  for (int domain = 0; domain < routing.num_domains(); ++domain) {
    const HostPlan& partner = (*plans)[domain * size + r % size];
    for (int t = 0; t < routing.tokens; ++t) {
      for (int i = 0; i < size; ++i) {
        if (!IsSent(routing, partner, t, first + i)) continue;
        const int64_t at = (int64_t{domain} * routing.tokens + t) * routing.domain_words() + i / 32;
        plan.token_ranks[at] |= uint32_t{1} << i % 32;
      }
    }
  }
  for (int row = 0; row < routing.rows; ++row) {
    const int32_t* source = &plan.row_source[3 * row];
    int index = source[0] < 0 ? -1 : 0;
    for (int lower = first; source[0] >= 0 && lower < r; ++lower) {
      index += IsSent(routing, (*plans)[source[0]], source[1], lower);
    }
    plan.domain_partial_sum_index.push_back(index);
  }
}

inline std::vector<HostPlan> MakePlans(const Routing& routing) {
  const int tokens = routing.tokens, top_k = routing.top_k, ranks = routing.ranks;
  const int local = routing.local();
  std::vector<std::vector<int>> counts(routing.experts, std::vector<int>(ranks));
  std::vector<HostPlan> plans(ranks);
  const auto is_routed = [&](int id) { return id >= 0 && id < routing.experts; };
  for (int s = 0; s < ranks; ++s) {
    for (int id : routing.ids[s]) {
      if (is_routed(id)) ++counts[id][s];
      if (id < -1 || id >= routing.experts) ++plans[s].num_bad_ids;
    }
  }
  const std::vector<int> quotas = Quotas(routing, counts);
  for (int s = 0; s < ranks; ++s) {
    std::vector<int> position(routing.experts);
    plans[s].kept.resize(tokens * top_k);
    plans[s].destination.assign(tokens * top_k, -1);
    for (int c = 0; c < tokens * top_k; ++c) {
      const int id = routing.ids[s][c];
      if (!is_routed(id) || position[id]++ >= quotas[id]) continue;
      plans[s].kept[c] = 1;
      plans[s].destination[c] = id / local;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    HostPlan& plan = plans[r];
    plan.row_source.assign(size_t{3} * routing.rows, -1);
    plan.partial_sum_index.assign(routing.rows, -1);
    int row = 0;
    int64_t received = 0;
    for (int e = 0; e < local; ++e) {
      plan.row_offsets.push_back(row);
      const int first = row;
      for (int s = 0; s < ranks; ++s) {
        received += counts[r * local + e][s];
        for (int c = 0; c < tokens * top_k; ++c) {
          if (routing.ids[s][c] != r * local + e || !plans[s].kept[c]) continue;
          plan.row_source[3 * row] = s;
          plan.row_source[3 * row + 1] = c / top_k;
          plan.row_source[3 * row + 2] = c % top_k;
          int slot = 0;
          for (int lower = 0; lower < r; ++lower) {
            slot += IsSent(routing, plans[s], c / top_k, lower);
          }
          plan.partial_sum_index[row++] = slot;
        }
      }
      plan.real_group_sizes.push_back(row - first);
      row = first + (row - first + routing.align - 1) / routing.align * routing.align;
      plan.group_sizes.push_back(row - first);
    }
    plan.row_offsets.push_back(row);
    plan.num_received = static_cast<int32_t>(received);
    plan.num_dropped = plan.num_received;
    for (int n : plan.real_group_sizes) plan.num_dropped -= n;
    AddForwarding(routing, r, &plans);
  }
  return plans;
}

// rows[M, H] and row_weights[M] of one rank; the tail is zero.
inline void DispatchRows(const Routing& routing, const HostPlan& plan, int64_t row_bytes,
                         const std::vector<Bytes>& x,
                         const std::vector<std::vector<float>>& weights, Bytes* rows,
                         std::vector<float>* row_weights) {
  rows->assign(row_bytes * routing.rows, 0);
  row_weights->assign(routing.rows, 0);
  for (int row = 0; row < routing.rows; ++row) {
    const int s = plan.row_source[3 * row], t = plan.row_source[3 * row + 1];
    if (s < 0) continue;
    std::memcpy(&(*rows)[row * row_bytes], &x[s][t * row_bytes], row_bytes);
    if (!weights.empty()) {
      (*row_weights)[row] = weights[s][t * routing.top_k + plan.row_source[3 * row + 2]];
    }
  }
}

// row_scales[M, num_scales] of one rank; padding and the tail have ones.
inline void DispatchScales(const Routing& routing, const HostPlan& plan, int num_scales,
                           ElementType type, const std::vector<Bytes>& scales, Bytes* row_scales) {
  const int64_t bytes = num_scales * jax_ep::ElementBytes(type);
  std::vector<float> unused;
  DispatchRows(routing, plan, bytes, scales, {}, row_scales, &unused);
  for (int64_t i = 0; i < int64_t{routing.rows} * num_scales; ++i) {
    if (plan.row_source[3 * (i / num_scales)] >= 0) continue;
    if (type == jax_ep::kF32) {
      WriteElement(*row_scales, i, type, 1);
    } else {
      (*row_scales)[i] = EightBitOne(type);
    }
  }
}

// out[T, H] and assignment_scalars[T, K] of every rank. Empty weights are ones. Every sum is
// rounded: a rank's, its domain's, and the token's. The latter two are the same if there is one
// domain.
inline void CombineRows(const Routing& routing, const std::vector<HostPlan>& plans, int hidden,
                        ElementType type, const std::vector<Bytes>& y,
                        const std::vector<std::vector<float>>& weights,
                        const std::vector<std::vector<float>>& scalars, std::vector<Bytes>* out,
                        std::vector<std::vector<float>>* assignment_scalars) {
  const int tokens = routing.tokens, top_k = routing.top_k, ranks = routing.ranks;
  const int domain_size = routing.domain_size == 0 ? ranks : routing.domain_size;
  const int64_t row_bytes = hidden * jax_ep::ElementBytes(type);
  out->assign(ranks, Bytes(tokens * row_bytes));
  assignment_scalars->assign(ranks, std::vector<float>(tokens * top_k));
  // row_of[s][c] on the assignment's destination
  std::vector<std::vector<int>> row_of(ranks, std::vector<int>(tokens * top_k, -1));
  for (int r = 0; r < ranks; ++r) {
    for (int row = 0; row < routing.rows; ++row) {
      const int32_t* source = &plans[r].row_source[3 * row];
      if (source[0] >= 0) row_of[source[0]][source[1] * top_k + source[2]] = row;
    }
  }
  struct Term {
    int rank, row;
    float weight;
  };
  for (int s = 0; s < ranks; ++s) {
    for (int t = 0; t < tokens; ++t) {
      std::vector<Term> terms;  // in the order of (rank, k)
      for (int r = 0; r < ranks; ++r) {
        for (int c = t * top_k; c < (t + 1) * top_k; ++c) {
          if (plans[s].destination[c] != r) continue;
          const int row = row_of[s][c];
          terms.push_back({r, row, weights.empty() ? 1.0f : weights[r][row]});
          if (!scalars.empty()) (*assignment_scalars)[s][c] = scalars[r][row];
        }
      }
      for (int h = 0; h < hidden; ++h) {
        float total = 0;
        for (size_t i = 0; i < terms.size();) {
          const int domain = terms[i].rank / domain_size;
          float domain_sum = 0;
          while (i < terms.size() && terms[i].rank / domain_size == domain) {
            const int r = terms[i].rank;
            float sum = 0;
            for (; i < terms.size() && terms[i].rank == r; ++i) {
              const float value = ReadElement(y[r], int64_t{terms[i].row} * hidden + h, type);
              sum = std::fmaf(terms[i].weight, value, sum);
            }
            domain_sum += RoundTo(sum, type);
          }
          total += RoundTo(domain_sum, type);
        }
        WriteElement((*out)[s], int64_t{t} * hidden + h, type, total);
      }
    }
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_CONTRACT_H_
