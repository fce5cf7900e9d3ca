"""The pure-JAX grouped matmuls: the semantic oracle, and what runs where there is no CUDA kernel.

One function per primitive, with the primitive's operands and parameters. All loop over blocks
of rows that never span two groups, so the cost of a product follows the number of rows in groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core.loops import divide, fori_loop
from jax_ep._src.matmul.activations import activate, activate_backward
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams

ROWS_PER_BLOCK = 128
"""Rows of one loop iteration: large enough to keep a CPU's vector units busy."""

COLUMNS_PER_DOT = 128
"""Columns of the intermediate activations that one column of `row_dots` sums over."""


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    params: GroupedMatmulParams,
) -> tuple[jax.Array]:
    """One matmul per group of rows."""
    out = _products(lhs, rhs, group_sizes, params.transpose_rhs, params.out_dtype)
    return (_fill_tail(out, group_sizes, 0 if params.zero_tail else jnp.nan),)


def grouped_matmul_rhs_gradient(
    lhs: jax.Array,
    out_gradient: jax.Array,
    group_sizes: jax.Array,
    *accumulator: jax.Array,
    params: GroupedMatmulParams,
    has_accumulator: bool,
) -> tuple[jax.Array]:
    """The contraction over each group's rows, added to the accumulator.

    Groups without rows get zeros, or keep the accumulator as it is.
    """
    blocks = _blocks(group_sizes, lhs.shape[0])
    a, b = (out_gradient, lhs) if params.transpose_rhs else (lhs, out_gradient)
    a, b = (jnp.pad(m, ((0, ROWS_PER_BLOCK), (0, 0))) for m in (a, b))

    def body(block: jax.Array, gradient: jax.Array) -> jax.Array:
        group, start, in_group = blocks.at(block)
        product = _matmul(
            _rows_at(a, start, in_group), _rows_at(b, start, in_group), contract=(0, 0)
        )
        return gradient.at[group].add(product)

    if has_accumulator:
        (gradient,) = accumulator
    else:
        gradient = jnp.zeros((group_sizes.shape[0], a.shape[1], b.shape[1]), jnp.float32)
    gradient = fori_loop(blocks.count, body, gradient, like=a, also_like=b)
    return (gradient.astype(params.out_dtype),)


def grouped_matmul_activation(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *optional: jax.Array,
    params: GroupedMatmulActivationParams,
    has_bias: bool,
    has_row_weights: bool,
    keep_pre_activation: bool,
) -> tuple[jax.Array, ...]:
    """Matmul, bias, activation and row weight; and the pre-activation, if it is kept."""
    return activation_epilogue(
        _products(lhs, rhs, group_sizes, False, jnp.float32),
        group_sizes,
        *optional,
        dtype=lhs.dtype,
        params=params,
        has_bias=has_bias,
        has_row_weights=has_row_weights,
        keep_pre_activation=keep_pre_activation,
    )


def activation_epilogue(
    accumulators: jax.Array,
    group_sizes: jax.Array,
    *optional: jax.Array,
    dtype: Any,
    params: GroupedMatmulActivationParams,
    has_bias: bool,
    has_row_weights: bool,
    keep_pre_activation: bool,
) -> tuple[jax.Array, ...]:
    """Does what follows the matmul in `grouped_matmul_activation`; results are in `dtype`."""
    if has_bias:
        accumulators = accumulators + optional[0][_group_of_rows(group_sizes, len(accumulators))]
    pre_activation = _round(accumulators, dtype)
    if params.activation == "none":
        out = accumulators
    else:
        out = activate(params.activation, pre_activation.astype(jnp.float32))
    if has_row_weights:
        out = out * optional[-1][:, None]
    results = (out.astype(dtype), pre_activation)[: 1 + keep_pre_activation]
    tail = 0 if params.zero_tail else jnp.nan
    return tuple(_fill_tail(result, group_sizes, tail) for result in results)


def grouped_matmul_activation_gradient(
    out_gradient: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    pre_activation: jax.Array,
    *row_weights: jax.Array,
    params: GroupedMatmulActivationParams,
    has_row_weights: bool,
) -> tuple[jax.Array, ...]:
    """Gradient of the pre-activation, the weighted activations, and the row dots by block."""
    accumulators = _products(out_gradient, rhs, group_sizes, True, jnp.float32)
    return activation_gradient_epilogue(
        _round(accumulators, out_gradient.dtype),
        group_sizes,
        pre_activation,
        *row_weights,
        params=params,
        has_row_weights=has_row_weights,
    )


def activation_gradient_epilogue(
    activations_bar: jax.Array,
    group_sizes: jax.Array,
    pre_activation: jax.Array,
    *row_weights: jax.Array,
    params: GroupedMatmulActivationParams,
    has_row_weights: bool,
) -> tuple[jax.Array, ...]:
    """Does what follows the rounded matmul in `grouped_matmul_activation_gradient`."""
    dtype = activations_bar.dtype
    weights = row_weights[0] if has_row_weights else None
    gradient, activations, products = activate_backward(
        params.activation, activations_bar, pre_activation, weights
    )
    num_rows, size = products.shape
    num_dots = -(-size // COLUMNS_PER_DOT)
    missing = num_dots * COLUMNS_PER_DOT - size
    products = jnp.pad(products, ((0, 0), (0, missing)))
    row_dots = products.reshape(num_rows, num_dots, COLUMNS_PER_DOT).sum(2)
    results = gradient.astype(dtype), activations.astype(dtype), row_dots
    tail = 0 if params.zero_tail else jnp.nan
    return tuple(_fill_tail(result, group_sizes, tail) for result in results)


# ---- blocks of rows


class _Blocks:
    """The rows of all groups, cut into blocks of `ROWS_PER_BLOCK` that never span two groups.

    Where each begins is computed for all at once: the loops of a layer share it.
    """

    def __init__(self, group_sizes: jax.Array, num_rows: int):
        ends = group_ends(group_sizes, num_rows)
        sizes = jnp.diff(ends, prepend=0)
        blocks_of = divide(sizes + (ROWS_PER_BLOCK - 1), ROWS_PER_BLOCK)
        last_blocks = jnp.cumsum(blocks_of)
        self.count = last_blocks[-1]
        most = -(-num_rows // ROWS_PER_BLOCK) + group_sizes.shape[0]
        block = jnp.arange(most, dtype=ends.dtype)
        group = (last_blocks <= block[:, None]).sum(1)
        self.group = jnp.minimum(group, group_sizes.shape[0] - 1)
        first_rows = ends - sizes - (last_blocks - blocks_of) * ROWS_PER_BLOCK
        self.start = first_rows[self.group] + block * ROWS_PER_BLOCK
        self.rows_left = ends[self.group] - self.start

    def at(self, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(group, first row, which of the block's rows are in the group: bool[rows, 1])."""
        group, start, rows_left = (
            lax.dynamic_index_in_dim(values, block, keepdims=False)
            for values in (self.group, self.start, self.rows_left)
        )
        return group, start, (jnp.arange(ROWS_PER_BLOCK) < rows_left)[:, None]


def _blocks(group_sizes: jax.Array, num_rows: int) -> _Blocks:
    return _Blocks(group_sizes, num_rows)


def group_ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    # Sizes come from the device: negative ones and sums past the end must stay harmless.
    return jnp.minimum(jnp.cumsum(jnp.clip(group_sizes, 0, num_rows)), num_rows)


def _group_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """int32[M]; rows of the tail count to the last group."""
    ends = group_ends(group_sizes, num_rows)
    group = (ends <= jnp.arange(num_rows)[:, None]).sum(1)
    return jnp.minimum(group, group_sizes.shape[0] - 1)


def _fill_tail(rows: jax.Array, group_sizes: jax.Array, value: float) -> jax.Array:
    in_tail = jnp.arange(rows.shape[0]) >= group_ends(group_sizes, rows.shape[0])[-1]
    return jnp.where(in_tail[:, None], value, rows).astype(rows.dtype)


def _rows_at(matrix: jax.Array, start: jax.Array, in_group: jax.Array) -> jax.Array:
    rows = lax.dynamic_slice_in_dim(matrix, start, ROWS_PER_BLOCK)
    return jnp.where(in_group, rows, 0)


# ---- products


def _products(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, transpose_rhs: bool, dtype: Any
) -> jax.Array:
    """Each group of rows times its matrix; the tail is unspecified."""
    num_rows = lhs.shape[0]
    blocks = _blocks(group_sizes, num_rows)
    lhs = jnp.pad(lhs, ((0, ROWS_PER_BLOCK), (0, 0)))
    rhs = rhs.astype(lhs.dtype)

    def body(block: jax.Array, out: jax.Array) -> jax.Array:
        group, start, in_group = blocks.at(block)
        rows = _rows_at(lhs, start, in_group)
        matrix = lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        product = _matmul(rows, matrix, contract=(1, 1 if transpose_rhs else 0))
        # Rows of the block past the group's end are overwritten by the next group's first block.
        return lax.dynamic_update_slice_in_dim(out, product.astype(dtype), start, 0)

    num_columns = rhs.shape[1 if transpose_rhs else 2]
    out = jnp.zeros((num_rows + ROWS_PER_BLOCK, num_columns), dtype)
    return fori_loop(blocks.count, body, out, like=lhs, also_like=rhs)[:num_rows]


def _matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _round(values: jax.Array, dtype: Any) -> jax.Array:
    """Casts for good: XLA may remove a cast to a narrower dtype and back, for more precision."""
    return lax.optimization_barrier(values.astype(dtype))
