"""Layers in plain JAX as people write them, around a grouped matmul like lax.ragged_dot.

Each is made for a problem, and is a function of one rank's x [T, H], ids [T, K], weights [T, K],
w_up [L, H, 2F] (gate first) and w_down [L, F, H]. Float32 weights are cast where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.bench.common.programs import AXIS
from jax_ep.bench.layer.problem import Problem

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Layer = Callable[..., jax.Array]

CAPACITY_FACTOR = 1.25
SEQUENCE = 1024  # tokens that share the capacity of the einsum form
ROW_TILING = 128


def mlp(
    matmul: GroupedMatmul, rows: jax.Array, sizes: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """Applies each group's expert to its rows."""
    gate, up = jnp.split(matmul(rows, w_up.astype(rows.dtype), sizes), 2, axis=-1)
    return matmul(jax.nn.silu(gate) * up, w_down.astype(rows.dtype), sizes)


def count(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns how often each expert is in `ids`."""
    return jnp.bincount(ids.ravel(), length=num_experts).astype(jnp.int32)


def sum_of_choices(y: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weighted sum of y [T * K, H], which is in the order of the tokens."""
    by_token = y.reshape(*weights.shape, -1).astype(jnp.float32)
    return (by_token * weights[..., None]).sum(1).astype(y.dtype)


# ---- one GPU


def sort_gather(problem: Problem, matmul: GroupedMatmul) -> Layer:
    """Sorts rows by expert; each token gathers its outputs again."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        order = jnp.argsort(ids.ravel(), stable=True)
        sizes = count(ids, w_up.shape[0])
        y = mlp(matmul, x[order // ids.shape[1]], sizes, w_up, w_down)
        return sum_of_choices(y[jnp.argsort(order)], weights)

    return layer


def sort_scatter(problem: Problem, matmul: GroupedMatmul) -> Layer:
    """Sorts rows by expert; each output is added to its token."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        order = jnp.argsort(ids.ravel(), stable=True)
        tokens = order // ids.shape[1]
        y = mlp(matmul, x[tokens], count(ids, w_up.shape[0]), w_up, w_down)
        weighted = y.astype(jnp.float32) * weights.ravel()[order][:, None]
        return jnp.zeros(x.shape, jnp.float32).at[tokens].add(weighted).astype(x.dtype)

    return layer


def einsum(problem: Problem, matmul: GroupedMatmul, factor: float = CAPACITY_FACTOR) -> Layer:
    """Masks of [sequences, tokens, experts, slots], as MaxText's dropping form has them."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        num_experts, top_k = w_up.shape[0], ids.shape[1]
        num_sequences = max(1, x.shape[0] // SEQUENCE)
        tokens = x.reshape(num_sequences, -1, x.shape[1])
        length = tokens.shape[1]
        slots = math.ceil(factor * length * top_k / num_experts)
        chosen = jax.nn.one_hot(ids.reshape(num_sequences, -1), num_experts, dtype=jnp.int32)
        slot = ((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1)
        by_slot = jax.nn.one_hot(slot, slots, dtype=x.dtype)  # zero past the capacity
        by_choice = (num_sequences, length, top_k, -1)
        expert_of, slot_of = (a.astype(x.dtype).reshape(by_choice) for a in (chosen, by_slot))
        mask = jnp.einsum("gske,gskc->gsec", expert_of, slot_of)
        weighted = expert_of * weights.reshape(by_choice).astype(x.dtype)
        weight_mask = jnp.einsum("gske,gskc->gsec", weighted, slot_of)
        rows = jnp.einsum("gsh,gsec->egch", tokens, mask)
        hidden = jnp.einsum("egch,ehf->egcf", rows, w_up.astype(x.dtype))
        gate, up = jnp.split(hidden, 2, axis=-1)
        y = jnp.einsum("egcf,efh->egch", jax.nn.silu(gate) * up, w_down.astype(x.dtype))
        return jnp.einsum("egch,gsec->gsh", y, weight_mask).reshape(x.shape)

    return layer


# ---- several GPUs


def capacity(problem: Problem) -> int:
    """Returns the rows of a rank: jax_ep's capacity, and what tokamax's Mosaic kernels can tile."""
    return math.ceil(problem.routes.recv_capacity / ROW_TILING) * ROW_TILING


def gather_scatter(problem: Problem, matmul: GroupedMatmul) -> Layer:
    """Gathers all tokens on every rank, which computes its experts; psum_scatter sums."""
    num_rows = capacity(problem)

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        x, ids, weights = (lax.all_gather(a, AXIS, tiled=True) for a in (x, ids, weights))
        num_local, top_k = w_up.shape[0], ids.shape[1]
        local = ids.ravel() - lax.axis_index(AXIS) * num_local
        is_local = (local >= 0) & (local < num_local)
        order = jnp.argsort(jnp.where(is_local, local, num_local), stable=True)[:num_rows]
        tokens = order // top_k
        sizes = count(jnp.where(is_local, local, num_local), num_local + 1)[:-1]
        # Rows past the last group are unspecified in results of matmuls, and so in gradients.
        in_group = jnp.arange(order.size)[:, None] < sizes.sum()
        y = mlp(matmul, jnp.where(in_group, x[tokens], 0), sizes, w_up, w_down)
        y = jnp.where(in_group, y, 0).astype(jnp.float32)
        weighted = y * weights.ravel()[order][:, None]
        sums = jnp.zeros(x.shape, jnp.float32).at[tokens].add(weighted).astype(x.dtype)
        return lax.psum_scatter(sums, AXIS, tiled=True)

    return layer


def ragged_all_to_all(problem: Problem, matmul: GroupedMatmul) -> Layer:
    """Sends each expert's rows to their place among that expert's rows, and back."""
    num_rows = capacity(problem)

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        num_local, top_k = w_up.shape[0], ids.shape[1]
        order = jnp.argsort(ids.ravel(), stable=True)
        rows = x[order // top_k]
        there, back, sizes = exchanges(ids, problem.routes.num_experts, num_local)
        received = send(rows, num_rows, there)
        y = mlp(matmul, received, sizes, w_up, w_down)
        returned = send(y, rows.shape[0], back)
        return sum_of_choices(returned[jnp.argsort(order)], weights)

    return layer


def send(rows: jax.Array, num_rows: int, operands: tuple[jax.Array, ...]) -> jax.Array:
    """Exchanges rows; those that nobody sends are zeros."""
    output = jnp.zeros_like(rows, shape=(num_rows, rows.shape[1]))
    return lax.ragged_all_to_all(rows, output, *operands, axis_name=AXIS)


def exchanges(
    ids: jax.Array, num_experts: int, num_local: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]:
    """Returns lax.ragged_all_to_all's offsets and sizes there and back, and the group sizes.

    There is one update for each expert, so that rows arrive in the order of the experts.
    """
    counts = lax.all_gather(count(ids, num_experts), AXIS)  # [sources, experts]
    rank = lax.axis_index(AXIS)
    # Where each source's rows of an expert begin, at the source and at the expert's rank.
    at_source = jnp.cumsum(counts, 1) - counts
    of_rank = counts.sum(0).reshape(-1, num_local)
    starts = (jnp.cumsum(of_rank, 1) - of_rank).ravel()
    at_rank = starts + jnp.cumsum(counts, 0) - counts

    def local(array: jax.Array) -> jax.Array:
        """The experts of this rank, for every source."""
        return lax.dynamic_slice_in_dim(array, rank * num_local, num_local, 1).ravel()

    there = at_source[rank], counts[rank], at_rank[rank], local(counts)
    back = local(at_rank), local(counts), local(at_source), counts[rank]
    return there, back, of_rank[rank]
