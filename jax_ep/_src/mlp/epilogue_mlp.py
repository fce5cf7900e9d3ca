"""The MLP of an activation with a name: bias, activation and row weights run in epilogues.

Forward and backward stand by themselves, because `moe_mlp` may get the rows of its backward pass in
another way than by keeping them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import compat
from jax_ep._src.core.runtime import LIMITS
from jax_ep._src.matmul.accumulation import Accumulators
from jax_ep._src.matmul.groups import rows_in_groups
from jax_ep._src.matmul.primitives import bind_matmul, bind_rhs_gradient
from jax_ep._src.mlp.experts import Experts, gradient_of_experts
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.mlp.weights_only import (
    activation_gradient,
    lhs_gradient,
    multiply,
    multiply_and_activate,
)
from jax_ep._src.quant.quantized import as_bits, from_bits

BIAS_COLUMNS = LIMITS["vector_bytes"] // 2
"""Columns of the narrow matmuls that sum for biases: the fewest that fill a vector."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def epilogue_mlp(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> tuple[jax.Array, Accumulators]:
    """Returns [M, H] in rows' dtype, and the accumulators for a later call."""
    y, _ = epilogue_mlp_forward(rows, experts, group_sizes, row_weights, params, keep=False)
    return y, experts.passed_on(params.accumulation, y)


def epilogue_mlp_forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    *,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the result, and the pre-activation if it is to be kept."""
    w_up, w_down = experts.multiplied
    b_up, b_down = experts.b_up, experts.b_down
    activations, pre_activation = multiply_and_activate(
        rows, w_up, group_sizes, b_up, None, params, params.activation, keep_pre_activation=keep
    )
    pre_activation = checkpoint_name(pre_activation, "jax_ep.pre_activation")
    if b_down is None and row_weights is None:
        to_y = params.matmul(rows.dtype, zero_tail=params.zero_tail)
        return multiply(activations, w_down, group_sizes, to_y), pre_activation
    y, _ = multiply_and_activate(
        activations, w_down, group_sizes, b_down, row_weights, params, "none"
    )
    if params.zero_tail:  # the epilogue leaves it unspecified
        y = jnp.where(rows_in_groups(group_sizes, y.shape[0])[:, None], y, 0)
    return y, pre_activation


def repeat_pre_activation(
    rows: jax.Array, experts: Experts, group_sizes: jax.Array, params: GroupedMlpParams
) -> jax.Array:
    """Returns the pre-activation that `epilogue_mlp_forward` keeps, by a matmul of its own."""
    w_up, _ = experts.multiplied
    if experts.b_up is None:
        return multiply(rows, w_up, group_sizes, params.matmul(rows.dtype))
    pre_activation, _ = multiply_and_activate(
        rows, w_up, group_sizes, experts.b_up, None, params, "none"
    )
    return pre_activation


def epilogue_mlp_backward(
    params: GroupedMlpParams, residuals: Any, y_bar: jax.Array, accumulators: Accumulators
) -> tuple[jax.Array, Experts, jax.Array | None]:
    """Returns the gradients of rows, experts and row weights."""
    rows, experts, group_sizes, row_weights, pre_activation = residuals
    rows_bar, row_weights_bar, kept = rows_backward(
        params, (experts, group_sizes, row_weights, pre_activation), y_bar
    )
    experts_bar = experts_backward(
        params, (rows, experts, group_sizes, row_weights, *kept), y_bar, accumulators
    )
    return rows_bar, experts_bar, row_weights_bar


def rows_backward(
    params: GroupedMlpParams, residuals: Any, y_bar: jax.Array
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of rows and row weights, which need no rows.

    And the activations and the pre-activation's gradient, for `experts_backward`.
    """
    experts, group_sizes, row_weights, pre_activation = residuals
    w_up, w_down = experts.multiplied
    pre_activation_bar, activations, row_dots = activation_gradient(
        y_bar, w_down, group_sizes, pre_activation, row_weights, params
    )
    to_rows = params.matmul(y_bar.dtype, zero_tail=params.zero_tail)
    rows_bar = lhs_gradient(pre_activation_bar, w_up, group_sizes, to_rows)
    row_weights_bar = None
    if row_weights is not None:
        row_weights_bar = row_dots.sum(1)
        if experts.b_down is not None:
            row_weights_bar += _dots_with_group(y_bar, experts.b_down, group_sizes, params)
        if params.zero_tail:
            in_groups = rows_in_groups(group_sizes, y_bar.shape[0])
            row_weights_bar = jnp.where(in_groups, row_weights_bar, 0)
    return rows_bar, row_weights_bar, (activations, pre_activation_bar)


def experts_backward(
    params: GroupedMlpParams, residuals: Any, y_bar: jax.Array, accumulators: Accumulators
) -> Experts:
    """Returns the gradients of experts."""
    rows, experts, group_sizes, row_weights, activations, pre_activation_bar = residuals
    w_up_bar = w_down_bar = None
    if experts.w_up is not None:
        # Accumulators are float32; gradients of float32 weights are never rounded.
        to_up, to_down = (
            params.matmul(params.accumulation.dtype(w)) for w in (experts.w_up, experts.w_down)
        )
        w_up_bar = bind_rhs_gradient(
            rows, pre_activation_bar, group_sizes, to_up, accumulators.w_up
        )
        w_down_bar = bind_rhs_gradient(
            activations, y_bar, group_sizes, to_down, accumulators.w_down
        )
    b_up_bar = b_down_bar = None
    if experts.b_up is not None:
        b_up_bar = _sum_of_groups(None, pre_activation_bar, group_sizes, params)
    if experts.b_down is not None:
        b_down_bar = _sum_of_groups(row_weights, y_bar, group_sizes, params)
    return gradient_of_experts(params.accumulation, w_up_bar, w_down_bar, b_up_bar, b_down_bar)


def _forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> Any:
    y, pre_activation = epilogue_mlp_forward(
        rows, experts, group_sizes, row_weights, params, keep=True
    )
    experts_kept = experts.without_accumulators()
    residuals = rows, experts_kept, group_sizes, row_weights, pre_activation
    return (y, experts.passed_on(params.accumulation, y)), as_bits(residuals)


def _backward(params: GroupedMlpParams, residuals: Any, cotangents: Any) -> Any:
    rows_bar, experts_bar, row_weights_bar = epilogue_mlp_backward(
        params, from_bits(residuals), *cotangents
    )
    return rows_bar, experts_bar, None, row_weights_bar


epilogue_mlp.defvjp(_forward, _backward)


# ---- gradients of biases, and of weights through biases: narrow matmuls sum in a fixed order


def _sum_of_groups(
    row_weights: jax.Array | None, rows: jax.Array, group_sizes: jax.Array, params: GroupedMlpParams
) -> jax.Array:
    """Returns the weighted sum of each group's rows [M, N], float32[L, N]."""
    if row_weights is None:
        terms = [jnp.ones(rows.shape[0], rows.dtype)]
    else:
        terms = _split(row_weights, rows.dtype)
    lhs, rows = compat.vary_together((_narrow(terms), rows))
    rows = rows.astype(lhs.dtype)
    sums = bind_rhs_gradient(lhs, rows, group_sizes, params.matmul(jnp.float32))
    return sums[:, : len(terms)].sum(1)


def _dots_with_group(
    rows: jax.Array, vectors: jax.Array, group_sizes: jax.Array, params: GroupedMlpParams
) -> jax.Array:
    """Returns the product of each row [M, H] with its group's vector float32[L, H], float32[M]."""
    terms = _split(vectors, rows.dtype)
    rhs = _narrow(terms)
    lhs = rows.astype(rhs.dtype)
    to_dots = params.matmul(jnp.float32, transpose_rhs=True)
    return bind_matmul(lhs, rhs, group_sizes, to_dots)[:, : len(terms)].sum(1)


def _narrow(terms: list[jax.Array]) -> jax.Array:
    """Stacks [n, ...] to [n, BIAS_COLUMNS, ...], and fills up with zeros."""
    stacked = jnp.stack(terms, axis=1)
    missing = BIAS_COLUMNS - len(terms)
    return jnp.pad(stacked, ((0, 0), (0, missing), *((0, 0),) * (stacked.ndim - 2)))


def _split(values: jax.Array, dtype: Any) -> list[jax.Array]:
    """Splits float32 values into an exact sum of terms that rows of `dtype` can be multiplied by.

    Three bfloat16 numbers hold the 24 bits of a float32. Three of float16 do not: the smallest term
    of usual values is below its range. So other rows are cast to float32 instead.
    """
    if dtype != jnp.bfloat16:
        return [values]
    terms = []
    for _ in range(3):
        # XLA may remove a cast there and back, but not this.
        term = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        values = values - term
    return terms
