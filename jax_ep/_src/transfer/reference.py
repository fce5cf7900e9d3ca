"""The pure-JAX transfers: the semantic oracle, and what runs where there is no CUDA kernel.

One function per primitive, with the primitive's operands and parameters. Exchange is by standard
collectives (all-gather in, all-to-all out); everything else follows from the gathered counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._src.core.expert_axis import ExpertAxis
from jax_ep._src.core.loops import fori_loop
from jax_ep._src.quant.quantized import unsigned
from jax_ep._src.transfer.params import TransferParams
from jax_ep._src.transfer.plan import PlanArrays
from jax_ep._src.transfer.reference_plan import make_plan

FILL: dict[str, Any] = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
"""Of a gather: zeros for indices out of range."""

MOST_GATHERED_BYTES = 1 << 22
"""On each rank, up to which values are gathered from all ranks rather than exchanged."""


def dispatch(*operands: jax.Array, params: TransferParams) -> tuple[jax.Array, ...]:
    """Rows, row weights if there are weights, and the arrays of the plan."""
    x, (topk_ids, *topk_weights) = split_rows(operands)
    plan = jax.tree.leaves(make_plan(topk_ids, params))
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
        integers = lax.bitcast_convert_type(x[0], unsigned(x[0].dtype))
        values = _gather_rows(integers.astype(jnp.uint8), source_row, plan, params)
        scales = _gather_rows(x[1], source_row, plan, params, padding=1)
        values = values.astype(integers.dtype)
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

    With several domains, the rank of each domain that has r's index sums in the domain, and sends
    one rounded sum over the network.
    """
    if domain_size is None:
        return _sum_in_order(_exchange(values, axis))
    ranks = np.arange(axis.size).reshape(-1, domain_size)
    by_index = values.reshape(*ranks.shape, *values.shape[1:]).swapaxes(0, 1)
    in_domain = lax.all_to_all(by_index, axis.name, 0, 0, axis_index_groups=ranks.tolist())
    sums = _sum_in_order(in_domain)  # for the rank with this index in each domain
    return _sum_in_order(lax.all_to_all(sums, axis.name, 0, 0, axis_index_groups=ranks.T.tolist()))


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
