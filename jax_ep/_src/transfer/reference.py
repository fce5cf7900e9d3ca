"""The pure-JAX transfers: the semantic oracle, and what runs where there is no CUDA kernel.

One function per primitive, with the primitive's operands and parameters. Exchange is by standard
collectives (all-gather in, all-to-all out); everything else follows from the gathered counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core.expert_axis import ExpertAxis
from jax_ep._src.core.loops import divide, fori_loop
from jax_ep._src.transfer.domains import Forwarding, num_words
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import PlanArrays

FILL: dict[str, Any] = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
"""Of a gather: zeros for indices out of range."""

MOST_GATHERED_BYTES = 1 << 22
"""On each rank, up to which values are gathered from all ranks rather than exchanged."""


def dispatch(*operands: jax.Array, params: TransferParams) -> tuple[jax.Array, ...]:
    """Rows, row weights if there are weights, and the arrays of the plan."""
    x, (topk_ids, *topk_weights) = split_rows(operands)
    plan = jax.tree.leaves(_make_plan(topk_ids, params))
    return *redispatch(*x, *plan, *topk_weights, params=params), *plan


def redispatch(*operands: jax.Array, params: TransferParams) -> tuple[jax.Array, ...]:
    """Rows, and row weights if there are weights, along the routes of a plan."""
    x, others = split_rows(operands)
    plan, topk_weights = PlanArrays.split(others, params)
    num_tokens, top_k = plan.kept.shape
    rank, token, k = plan.row_source.T
    source_row = rank * num_tokens + token
    if len(x) == 1:
        rows = [_gather_rows(x[0], source_row, plan, params)]
    else:
        bits = lax.bitcast_convert_type(x[0], jnp.uint8)
        values = _gather_rows(bits, source_row, plan, params)
        scales = _gather_rows(x[1], source_row, plan, params, padding=1)
        rows = [lax.bitcast_convert_type(values, x[0].dtype), scales]
    if not topk_weights:
        return tuple(rows)
    weights = topk_weights[0].reshape(num_tokens * top_k)
    return *rows, _gather_rows(weights, source_row * top_k + k, plan, params)


def combine(
    y: jax.Array,
    *operands: jax.Array,
    params: TransferParams,
    has_weights: bool,
    has_scalars: bool,
) -> tuple[jax.Array, ...]:
    """Each token's weighted sum of its rows, and each assignment's scalar, if rows have scalars."""
    axis = params.axis
    plan, optional = PlanArrays.split(operands, params)
    num_tokens, top_k = plan.kept.shape
    num_rows, hidden = y.shape
    if num_tokens == 0:
        return jnp.zeros((0, hidden), y.dtype), *[jnp.zeros((0, top_k))] * has_scalars
    num_assignments = axis.size * num_tokens * top_k
    rank, token, k = plan.row_source.T
    assignment = jnp.where(
        _is_real(plan, axis.size), (rank * num_tokens + token) * top_k + k, num_assignments
    )

    no_rows = jnp.full(num_assignments, num_rows)
    row_of = no_rows.at[assignment].set(jnp.arange(num_rows), mode="drop").reshape(-1, top_k)

    def add(k: jax.Array, accumulator: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(row_of, k, 1, keepdims=False)
        term = y.at[row].get(**FILL).astype(jnp.float32)
        if has_weights:
            weight = optional[0].at[row].get(**FILL)
            term = _fused_multiply_add(weight[:, None], term, accumulator)
        else:
            term = term + accumulator
        return jnp.where((row < num_rows)[:, None], term, accumulator)

    accumulator = jnp.zeros((axis.size * num_tokens, hidden), jnp.float32)
    accumulator = fori_loop(top_k, add, accumulator, like=y, also_like=row_of)
    partial_sums = accumulator.astype(y.dtype).reshape(axis.size, num_tokens, hidden)
    results = [_poison(_sum_over_ranks(partial_sums, axis, params.domain_size), plan)]

    if has_scalars:
        zeros = jnp.zeros(num_assignments, jnp.float32)
        scalars = zeros.at[assignment].set(optional[-1], mode="drop")
        arrived = _exchange(scalars.reshape(axis.size, num_tokens, top_k), axis)
        results.append(_poison(_select_rank(arrived, plan.destination), plan))
    return tuple(results)


# ---- routing


def _make_plan(topk_ids: jax.Array, params: TransferParams) -> PlanArrays:
    axis, num_experts = params.axis, params.num_experts
    num_rows, row_align = params.num_rows, params.row_align
    num_ranks, num_local = axis.size, num_experts // axis.size
    num_tokens, top_k = topk_ids.shape
    rank = lax.axis_index(axis.name)

    routed = ((topk_ids >= 0) & (topk_ids < num_experts)).reshape(-1)
    expert = jnp.where(routed, topk_ids.reshape(-1), num_experts)
    position, counts = _positions(expert, num_experts)
    all_counts = lax.all_gather(counts, axis.name).reshape(num_ranks, num_ranks, num_local)
    all_kept = all_counts  # [source, destination, local expert]
    if num_rows < num_ranks * num_tokens * top_k + num_local * (row_align - 1):  # some may not fit
        all_kept = _kept_counts(all_counts, num_rows, row_align)
    my_quota = jnp.append(lax.dynamic_index_in_dim(all_kept, rank, 0, False).reshape(-1), 0)
    kept = position < my_quota[expert]

    # All ranks' assignments, flat in (source, token, k) order, with -1 for those they dropped.
    sent_expert = lax.all_gather(jnp.where(kept, expert, -1), axis.name).reshape(-1)
    sent_position = lax.all_gather(position, axis.name).reshape(-1)
    sizes_of = (num_ranks, num_tokens, top_k)
    source, token, k = (lax.broadcasted_iota(jnp.int32, sizes_of, i).reshape(-1) for i in range(3))
    demand = lax.dynamic_index_in_dim(all_counts, rank, 1, False).sum()
    received = lax.dynamic_index_in_dim(all_kept, rank, 1, False)  # [source, local expert]
    real_sizes = received.sum(0)
    sizes = _round_up(real_sizes, row_align)
    offsets = jnp.append(0, jnp.cumsum(sizes))
    first_row = offsets[:-1] + jnp.cumsum(received, 0) - received  # [source, local expert]
    local = sent_expert - rank * num_local
    is_mine = (local >= 0) & (local < num_local) & (sent_expert >= 0)
    row = first_row.at[source, local].get(mode="clip") + sent_position
    row = jnp.where(is_mine, row, num_rows)
    sources = jnp.stack([source, token, k], 1)
    row_source = jnp.full((num_rows, 3), -1).at[row].set(sources, mode="drop")
    destination = jnp.where(sent_expert >= 0, divide(sent_expert, num_local), num_ranks)
    is_sent = (destination.reshape(-1, top_k, 1) == jnp.arange(num_ranks)).any(1)

    def partial_sum_index(first_rank: Any) -> jax.Array:
        """Counts the ranks, from `first_rank` to this one, that each row's token is sent to."""
        ranks = jnp.arange(num_ranks)
        index = (is_sent & (ranks >= first_rank) & (ranks < rank)).sum(1)
        return jnp.full(num_rows, -1).at[row].set(jnp.repeat(index, top_k), mode="drop")

    forwarding = None
    if params.domain_size is not None:
        forwarding = Forwarding(
            token_ranks=_token_ranks(
                is_sent.reshape(num_ranks, num_tokens, -1), params.domain_size, rank
            ),
            partial_sum_index=partial_sum_index(rank - rank % params.domain_size),
        )

    num_bad = jnp.sum((topk_ids < -1) | (topk_ids >= num_experts))
    arrays = PlanArrays(
        group_sizes=sizes,
        real_group_sizes=real_sizes,
        row_offsets=offsets,
        row_source=row_source,
        partial_sum_index=partial_sum_index(0),
        kept=kept.reshape(num_tokens, top_k),
        destination=jnp.where(kept, divide(expert, num_local), -1).reshape(num_tokens, top_k),
        num_received=demand[None],
        num_dropped=(demand - real_sizes.sum())[None],
        num_bad_ids=num_bad[None],
        status=jnp.zeros(1),
        forwarding=forwarding,
    )
    narrow = {jnp.dtype("int64"): jnp.int32, jnp.dtype("float32"): jnp.int32}
    return jax.tree.map(lambda a: a.astype(narrow.get(a.dtype, a.dtype)), arrays)


def _positions(expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Counts the earlier assignments to the same expert, and the assignments to each expert."""
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    order = jnp.argsort(expert, stable=True)
    first = jnp.cumsum(counts) - counts
    position = jnp.arange(expert.size) - first[expert[order]]
    return jnp.zeros_like(expert).at[order].set(position.astype(expert.dtype)), counts[:-1]


def _token_ranks(is_sent: jax.Array, size: int, rank: jax.Array) -> jax.Array:
    """Packs the ranks of this domain that the tokens of its rail are sent to."""
    words = num_words(size)
    num_ranks, num_tokens, _ = is_sent.shape
    by_domain = is_sent.reshape(num_ranks // size, size, num_tokens, num_ranks // size, size)
    of_rail = lax.dynamic_index_in_dim(by_domain, rank % size, 1, keepdims=False)
    here = lax.dynamic_index_in_dim(of_rail, divide(rank, size), 2, keepdims=False)
    bits = jnp.pad(here, ((0, 0), (0, 0), (0, words * 32 - size)))
    bits = bits.reshape(*here.shape[:2], words, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def _kept_counts(counts: jax.Array, num_rows: int, row_align: int) -> jax.Array:
    """Cuts `counts` [source, destination, local expert] to those that fit into `num_rows`.

    Every local expert of a destination gets the same cap, the largest that fits; within an expert
    every source gets the same quota, the largest within the cap.
    """
    demand = counts.sum(0)

    def cap_fits(cap: jax.Array) -> jax.Array:
        padded = _round_up(jnp.minimum(demand, cap[:, None]), row_align)
        return padded.sum(-1) <= num_rows

    cap = _largest(cap_fits, like=demand[:, 0])
    within_cap = jnp.minimum(demand, cap[:, None])
    quota = _largest(lambda q: jnp.minimum(counts, q).sum(0) <= within_cap, like=demand)
    return jnp.minimum(counts, quota)


def _largest(fits: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The largest int32 below 2^30 that fits, elementwise; `fits` is monotonic and fits(0)."""

    def body(step: jax.Array, value: jax.Array) -> jax.Array:
        larger = value + lax.shift_right_logical(jnp.int32(1 << 29), step.astype(jnp.int32))
        return jnp.where(fits(larger), larger, value)

    return fori_loop(30, body, jnp.zeros_like(like), like=like)


# ---- moving rows


def split_rows(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the arrays of rows, which are values and scales if they are quantized, and others."""
    count = 2 if operands[0].dtype.itemsize == 1 else 1
    return operands[:count], operands[count:]


def _is_real(plan: PlanArrays, num_ranks: int) -> jax.Array:
    """Which rows came from a token, and are not padding, tail or out of range: bool[M]."""
    in_groups = jnp.arange(plan.row_source.shape[0]) < plan.row_offsets[-1]
    limits = jnp.array([num_ranks, *plan.kept.shape])
    return in_groups & ((plan.row_source >= 0) & (plan.row_source < limits)).all(1)


def _gather_rows(
    values: jax.Array,
    index: jax.Array,
    plan: PlanArrays,
    params: TransferParams,
    padding: int = 0,
) -> jax.Array:
    """values[index] over all ranks' values, `padding` elsewhere, or NaN in the tail."""
    num_rows = index.shape[0]
    if values.shape[0] == 0:  # no rank has a token
        rows = jnp.full((num_rows, *values.shape[1:]), padding, values.dtype)
    else:
        everything = lax.all_gather(values, params.axis.name, tiled=True)
        index = jnp.where(_is_real(plan, params.axis.size), index, everything.shape[0])
        rows = everything.at[index].get(**FILL | {"fill_value": padding})
    if not params.zero_tail:
        # Nothing may read this tail: NaN shows a reader.
        in_tail = jnp.arange(num_rows) >= plan.row_offsets[-1]
        rows = jnp.where(in_tail.reshape(-1, *(1,) * (rows.ndim - 1)), _nan(rows.dtype), rows)
    return _poison(rows, plan)


def _exchange(values: jax.Array, axis: ExpertAxis) -> jax.Array:
    """Sends values[r] to rank r; the arriving values are in rank order.

    XLA compiles one copy per rank for an all-to-all on CPUs. Small values are gathered instead.
    """
    if axis.size == 1:  # its name may be that of no axis
        return values
    if values.nbytes * axis.size > MOST_GATHERED_BYTES:
        return lax.all_to_all(values, axis.name, 0, 0)
    gathered = lax.all_gather(values, axis.name)
    return lax.dynamic_index_in_dim(gathered, lax.axis_index(axis.name), 1, keepdims=False)


def _sum_over_ranks(values: jax.Array, axis: ExpertAxis, domain_size: int | None) -> jax.Array:
    """Sends values[r] to rank r, which sums the arriving values in rank order, in float32.

    With several domains the sum of each is rounded to the values' dtype, and these are summed.
    """
    arrived = _exchange(values, axis)
    if domain_size is not None:
        by_domain = arrived.reshape(-1, domain_size, *arrived.shape[1:])
        arrived = jnp.stack([_sum_in_order(domain) for domain in by_domain])
    return _sum_in_order(arrived)


def _sum_in_order(values: jax.Array) -> jax.Array:
    """Adds in float32, from the first to the last, and rounds once."""
    total = jnp.zeros(values.shape[1:], jnp.float32)
    for value in values:
        total = total + value.astype(jnp.float32)
    # A sum that begins with zero is never -0, but XLA leaves the zero out.
    return jnp.where(total == 0, 0, total).astype(values.dtype)


def _select_rank(values: jax.Array, destination: jax.Array) -> jax.Array:
    """values[destination] of every assignment, bit by bit; zero where there is none."""
    selected = jnp.zeros_like(values[0])
    for rank in range(values.shape[0]):
        selected = jnp.where(destination == rank, values[rank], selected)
    return selected


def _fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Rounds a * b + c to float32 once. XLA has no such operation, and may contract or not.

    In float64 the product is exact and only the sum rounds. Rounding that to odd first keeps the
    second rounding right (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums").
    """
    with jax.enable_x64(True):
        product = a.astype(jnp.float64) * b.astype(jnp.float64)
        addend = c.astype(jnp.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = lax.bitcast_convert_type(total, jnp.int64)
        is_even = (bits & 1) == 0
        away = jnp.where((error > 0) == (total > 0), 1, -1)
        to_odd = jnp.where((jnp.abs(error) > 0) & is_even, bits + away, bits)
        return lax.bitcast_convert_type(to_odd, jnp.float64).astype(jnp.float32)


def _poison(values: jax.Array, plan: PlanArrays) -> jax.Array:
    return jnp.where(plan.status[0] == 0, values, _nan(values.dtype))


def _nan(dtype: Any) -> jax.Array:
    """Returns NaN; for the bits of eight-bit values all ones, which are NaN in every format."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(jnp.nan, dtype)
    return jnp.array(jnp.iinfo(dtype).max, dtype)


# ---- small helpers


def _round_up(value: jax.Array, multiple: int) -> jax.Array:
    return (value + multiple - 1) // multiple * multiple
