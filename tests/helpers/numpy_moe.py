"""Expert parallelism in plain loops over ranks, tokens and assignments: the contract, sentence by sentence, without JAX.

Every array has a leading axis of ranks: x[R,T,H], topk_ids[R,T,K], topk_weights[R,T,K], rows[R,M,H], row_weights[R,M].
"""

import dataclasses
import math

import ml_dtypes  # noqa: F401  (gives numpy the dtype "bfloat16")
import numpy as np


@dataclasses.dataclass
class Plan:
    """The arrays of `jax_ep.Plan` as one rank holds them."""

    group_sizes: np.ndarray  # i32[L]
    real_group_sizes: np.ndarray  # i32[L]
    row_offsets: np.ndarray  # i32[L+1]
    row_source: np.ndarray  # i32[M,3]
    partial_sum_index: np.ndarray  # i32[M]
    kept: np.ndarray  # bool[T,K]
    destination: np.ndarray  # i32[T,K]
    num_received: np.ndarray  # i32[1]
    num_dropped: np.ndarray  # i32[1]
    num_bad_ids: np.ndarray  # i32[1]
    status: np.ndarray  # i32[1]
    domain_size: int | None = None  # ranks per NVLink domain; None for one level
    forwarding: tuple[np.ndarray, np.ndarray] | None = None  # u32[R/D,T,ceil(D/32)], i32[M]


FIELDS = tuple(
    f.name for f in dataclasses.fields(Plan) if f.name not in ("domain_size", "forwarding")
)


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def default_capacity(num_ranks, num_tokens, top_k, num_local_experts, row_align):
    most = num_ranks * num_tokens * min(top_k, num_local_experts)
    return round_up(most + num_local_experts * (row_align - 1), row_align)


def capacity_cap(sizes, recv_capacity, row_align):
    """The largest c with sum_e roundup(min(n_e, c), row_align) <= recv_capacity, at most max(n_e)."""
    cap = 0
    while cap < max(sizes):
        if sum(round_up(min(size, cap + 1), row_align) for size in sizes) > recv_capacity:
            break
        cap += 1
    return cap


def source_quota(counts, cap):
    """The largest q with sum_s min(n_s, q) <= min(sum_s n_s, cap), at most max(n_s)."""
    quota = 0
    while quota < max(counts):
        if sum(min(count, quota + 1) for count in counts) > min(sum(counts), cap):
            break
        quota += 1
    return quota


def make_plans(topk_ids, *, num_experts, recv_capacity=None, row_align=1, domain_size=None):
    """The plan of every rank, from the ids of all."""
    num_ranks, num_tokens, top_k = topk_ids.shape
    num_local = num_experts // num_ranks
    domain_size = None if domain_size == num_ranks else domain_size
    if recv_capacity is None:
        recv_capacity = default_capacity(num_ranks, num_tokens, top_k, num_local, row_align)

    wanted = [
        [[] for _ in range(num_ranks)] for _ in range(num_experts)
    ]  # [expert][source] -> [(token, k)]
    bad_ids = [0] * num_ranks
    for source in range(num_ranks):
        for token in range(num_tokens):
            for k in range(top_k):
                expert = int(topk_ids[source, token, k])
                if 0 <= expert < num_experts:
                    wanted[expert][source].append((token, k))
                elif expert != -1:
                    bad_ids[source] += 1

    kept = np.zeros((num_ranks, num_tokens, top_k), bool)
    destination = np.full((num_ranks, num_tokens, top_k), -1, np.int32)
    plans = []
    for rank in range(num_ranks):
        here = wanted[rank * num_local : (rank + 1) * num_local]
        sizes = [sum(len(assignments) for assignments in sources) for sources in here]
        cap = capacity_cap(sizes, recv_capacity, row_align)
        group_sizes, real_group_sizes, rows = [], [], []
        for sources in here:
            quota = source_quota([len(assignments) for assignments in sources], cap)
            group = []
            for source, assignments in enumerate(sources):
                for token, k in assignments[:quota]:
                    kept[source, token, k] = True
                    destination[source, token, k] = rank
                    group.append((source, token, k))
            padding = round_up(len(group), row_align) - len(group)
            real_group_sizes.append(len(group))
            group_sizes.append(len(group) + padding)
            rows += group + [(-1, -1, -1)] * padding
        assert len(rows) <= recv_capacity
        rows += [(-1, -1, -1)] * (recv_capacity - len(rows))
        plans.append(
            Plan(
                group_sizes=np.array(group_sizes, np.int32),
                real_group_sizes=np.array(real_group_sizes, np.int32),
                row_offsets=np.array(
                    [sum(group_sizes[:e]) for e in range(num_local + 1)], np.int32
                ),
                row_source=np.array(rows, np.int32).reshape(recv_capacity, 3),
                partial_sum_index=np.full(recv_capacity, -1, np.int32),  # filled in below
                kept=kept[rank],
                destination=destination[rank],
                num_received=np.array([sum(sizes)], np.int32),
                num_dropped=np.array([sum(sizes) - sum(real_group_sizes)], np.int32),
                num_bad_ids=np.array([bad_ids[rank]], np.int32),
                status=np.array([0], np.int32),
                domain_size=domain_size,
            )
        )
    for rank, row, source, token, _ in real_rows(plans):
        destinations = set(destination[source, token].tolist()) - {-1}
        plans[rank].partial_sum_index[row] = sorted(destinations).index(rank)
    if domain_size is not None:
        for rank, plan in enumerate(plans):
            plan.forwarding = forwarding(rank, plans, destination)
    return plans


def forwarding(rank, plans, destination):
    """Finds which ranks of the domain get each token of its rail, and the rows' sums among them."""
    size = plans[rank].domain_size
    here = range(rank // size * size, rank // size * size + size)
    partners = range(rank % size, len(plans), size)
    token_ranks = np.zeros((len(partners), destination.shape[1], -(-size // 32)), np.uint32)
    for i, partner in enumerate(partners):
        for token, destinations in enumerate(destination[partner].tolist()):
            for to in set(destinations) & set(here):
                word, bit = divmod(to - here.start, 32)
                token_ranks[i, token, word] |= np.uint32(1 << bit)
    index = np.full(len(plans[rank].row_source), -1, np.int32)
    for row, (source, token, _) in enumerate(plans[rank].row_source.tolist()):
        if source >= 0:
            index[row] = sorted(set(destination[source, token].tolist()) & set(here)).index(rank)
    return token_ranks, index


def stack(plans):
    """Field -> the ranks' arrays one after another, as `P(axis_name)` takes a plan out of shard_map."""
    return {name: np.concatenate([getattr(plan, name) for plan in plans]) for name in FIELDS}


def real_rows(plans):
    """(rank, row, source, token, k) of every row that carries a token."""
    for rank, plan in enumerate(plans):
        for row, (source, token, k) in enumerate(plan.row_source.tolist()):
            if source >= 0:
                yield rank, row, source, token, k


def num_rows(plan):
    return int(plan.row_offsets[-1])


def dispatch(x, topk_weights, plans, *, zero_tail=True):
    """rows[R,M,H] in x's dtype and row_weights[R,M] in float32; a tail that is not zeroed is NaN."""
    num_ranks, capacity = len(plans), len(plans[0].row_source)
    rows = np.zeros((num_ranks, capacity, x.shape[-1]), x.dtype)
    row_weights = None if topk_weights is None else np.zeros((num_ranks, capacity), np.float32)
    for rank, row, source, token, k in real_rows(plans):
        rows[rank, row] = x[source, token]
        if row_weights is not None:
            row_weights[rank, row] = topk_weights[source, token, k].astype(np.float32)
    if not zero_tail:
        poison_tail(rows, plans)
        poison_tail(row_weights, plans)
    return rows, row_weights


def poison_tail(values, plans, poison=np.nan):
    """Overwrites, in place, the rows that no group holds."""
    for rank, plan in enumerate(plans):
        if values is not None:
            values[rank, num_rows(plan) :] = poison


def fma(a, b, c):
    """float32 a*b + c with one rounding, elementwise.

    The product of two float32 is exact in float64. The sum is rounded to odd there, so that the second rounding, to
    float32, sees on which side of a tie the exact value lies.
    """
    a, b, c = (np.asarray(v, np.float32) for v in (a, b, c))
    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)  # TwoSum: exact
        is_even = np.atleast_1d(total).view(np.int64).reshape(total.shape) & 1 == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.where(inexact & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
        return odd.astype(np.float32)


def combine(y, plans, row_weights):
    """out[R,T,H] in y's dtype: float32 fma over a rank's assignments, rounded; then the ranks' sums in rank order.

    With NVLink domains each domain's sum is rounded too, and these are added in the order of domains.
    """
    domain_size = plans[0].domain_size or len(plans)
    num_ranks, (num_tokens, top_k), hidden = len(plans), plans[0].kept.shape, y.shape[-1]
    row_of = {(s, t, k): (rank, row) for rank, row, s, t, k in real_rows(plans)}
    out = np.zeros((num_ranks, num_tokens, hidden), y.dtype)
    for source in range(num_ranks):
        for token in range(num_tokens):
            total, of_domain = np.zeros((2, hidden), np.float32)
            for rank in range(num_ranks):
                here = np.zeros(hidden, np.float32)
                for k in range(top_k):
                    at, row = row_of.get((source, token, k), (-1, -1))
                    if at == rank:
                        weight = np.float32(1) if row_weights is None else row_weights[rank, row]
                        here = fma(weight, y[rank, row].astype(np.float32), here)
                with np.errstate(all="ignore"):
                    of_domain = of_domain + here.astype(y.dtype).astype(np.float32)
                    if (rank + 1) % domain_size == 0:
                        total = total + of_domain.astype(y.dtype).astype(np.float32)
                        of_domain = np.zeros(hidden, np.float32)
            with np.errstate(over="ignore"):
                out[source, token] = total.astype(y.dtype)
    return out


def dispatch_gradient(rows_gradient, row_weights_gradient, plans, weights_dtype=np.float32):
    """Gradients of x, by a combine, and of topk_weights: exact zeros where an assignment has no row."""
    x_gradient = combine(rows_gradient, plans, None)
    weights_gradient = None
    if row_weights_gradient is not None:
        weights_gradient = np.zeros((len(plans), *plans[0].kept.shape), weights_dtype)
        for rank, row, source, token, k in real_rows(plans):
            weights_gradient[source, token, k] = row_weights_gradient[rank, row].astype(
                weights_dtype
            )
    return x_gradient, weights_gradient


def combine_gradient(out_gradient, y, plans, row_weights):
    """Gradients of y (the token's gradient times the weight, rounded) and of row_weights (a row dot, in float64)."""
    y_gradient = np.zeros_like(y)
    weights_gradient = None if row_weights is None else np.zeros(y.shape[:2], np.float64)
    for rank, row, source, token, _ in real_rows(plans):
        gradient = out_gradient[source, token].astype(np.float32)
        if row_weights is not None:
            weights_gradient[rank, row] = sum(
                float(a) * float(b) for a, b in zip(y[rank, row], gradient, strict=True)
            )
            gradient = gradient * row_weights[rank, row]
        y_gradient[rank, row] = gradient.astype(y.dtype)
    return y_gradient, weights_gradient


def group_slices(group_sizes, capacity):
    """The rows of each group; negative sizes are empty and nothing passes the last row."""
    start = 0
    for size in group_sizes:
        stop = min(start + max(int(size), 0), capacity)
        yield slice(start, stop)
        start = stop


def grouped_matmul(lhs, rhs, group_sizes, *, transpose_rhs=False):
    """One rank's out[M,N] in float64: zeros past the groups, which are not read."""
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((len(lhs), matrices.shape[2]))
    for expert, rows in enumerate(group_slices(group_sizes, len(lhs))):
        out[rows] = lhs[rows] @ matrices[expert]
    return out


def grouped_matmul_gradient(lhs, rhs, group_sizes, out_gradient, *, transpose_rhs=False):
    """Gradients of lhs and rhs in float64."""
    lhs, rhs, out_gradient = (a.astype(np.float64) for a in (lhs, rhs, out_gradient))
    lhs_gradient, rhs_gradient = np.zeros_like(lhs), np.zeros_like(rhs)
    for expert, rows in enumerate(group_slices(group_sizes, len(lhs))):
        matrix = rhs[expert].T if transpose_rhs else rhs[expert]
        lhs_gradient[rows] = out_gradient[rows] @ matrix.T
        of_matrix = lhs[rows].T @ out_gradient[rows]
        rhs_gradient[expert] = of_matrix.T if transpose_rhs else of_matrix
    return lhs_gradient, rhs_gradient


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dense_moe(x, topk_ids, topk_weights, expert, *, num_experts, kept=None):
    """out[R,T,H] in float64: every token through each of its (kept) experts. expert(index, token[H]) -> [H']."""
    num_ranks, num_tokens, top_k = topk_ids.shape
    out = [[0.0] * num_tokens for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for token in range(num_tokens):
            for k in range(top_k):
                index = int(topk_ids[rank, token, k])
                if not 0 <= index < num_experts or (kept is not None and not kept[rank, token, k]):
                    continue
                weight = 1.0 if topk_weights is None else float(topk_weights[rank, token, k])
                out[rank][token] = out[rank][token] + weight * expert(
                    index, x[rank, token].astype(np.float64)
                )
    width = np.size(expert(0, x[0, 0].astype(np.float64)))
    return np.array([[np.broadcast_to(value, width) for value in row] for row in out])
