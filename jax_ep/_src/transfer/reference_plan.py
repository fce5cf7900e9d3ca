"""The plan in pure JAX: counts of all ranks, then every row's place, which follows from them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core.loops import divide, fori_loop
from jax_ep._src.transfer.domains import Forwarding, num_words
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import PlanArrays


def make_plan(topk_ids: jax.Array, params: TransferParams) -> PlanArrays:
    """Routes the tokens of a rank by the counts of all ranks."""
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
        all_kept = kept_counts(all_counts, num_rows, row_align)
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

    def of_rows(index: jax.Array) -> jax.Array:
        return jnp.full(num_rows, -1).at[row].set(jnp.repeat(index, top_k), mode="drop")

    forwarding = None
    if (size := params.domain_size) is not None:
        forwarding = Forwarding(
            token_ranks=_token_ranks(is_sent.reshape(num_ranks, num_tokens, -1), size, rank),
            partial_sum_index=of_rows(_partial_sum_index(is_sent, rank - rank % size, rank)),
        )
    num_bad = jnp.sum((topk_ids < -1) | (topk_ids >= num_experts))
    arrays = PlanArrays(
        group_sizes=sizes,
        real_group_sizes=real_sizes,
        row_offsets=offsets,
        row_source=row_source,
        partial_sum_index=of_rows(_partial_sum_index(is_sent, jnp.int32(0), rank)),
        kept=kept.reshape(num_tokens, top_k),
        destination=jnp.where(kept, divide(expert, num_local), -1).reshape(num_tokens, top_k),
        num_received=demand[None],
        num_dropped=(demand - real_sizes.sum())[None],
        num_bad_ids=num_bad[None],
        status=jnp.zeros(1),
        forwarding=forwarding,
    )
    as_they_are = jnp.bool_, jnp.uint32
    return jax.tree.map(lambda a: a if a.dtype in as_they_are else a.astype(jnp.int32), arrays)


def _positions(expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Counts the earlier assignments to the same expert, and the assignments to each expert."""
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    order = jnp.argsort(expert, stable=True)
    first = jnp.cumsum(counts) - counts
    position = jnp.arange(expert.size) - first[expert[order]]
    return jnp.zeros_like(expert).at[order].set(position.astype(expert.dtype)), counts[:-1]


def _partial_sum_index(is_sent: jax.Array, first_rank: jax.Array, rank: jax.Array) -> jax.Array:
    """Counts the ranks, from `first_rank` to this one, that each token is sent to."""
    ranks = jnp.arange(is_sent.shape[1])
    return (is_sent & (ranks >= first_rank) & (ranks < rank)).sum(1)


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


def kept_counts(counts: jax.Array, num_rows: int, row_align: int) -> jax.Array:
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


def _round_up(value: jax.Array, multiple: int) -> jax.Array:
    return (value + multiple - 1) // multiple * multiple
