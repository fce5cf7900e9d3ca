"""The MLP of an activation that is a function: it runs between two plain grouped matmuls.

The function may close over anything, so JAX differentiates the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._src.core import compat
from jax_ep._src.matmul.grouped_matmul import grouped_matmul
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_lhs_gradient, weights_only_matmul
from jax_ep._src.matmul.groups import rows_in_groups
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import chained_matmul, matmul_backward
from jax_ep._src.mlp.experts import Experts
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.quant.quantized import Quantized


def function_mlp_up(
    rows: jax.Array, experts: Experts, group_sizes: jax.Array, params: GroupedMlpParams
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the pre-activation [M, N], without the bias, and the accumulator for a later call."""
    pre_activation, accumulator = _matmul(
        rows, experts.multiplied[0], group_sizes, experts.accumulators.w_up, rows.dtype, params
    )
    return checkpoint_name(pre_activation, "jax_ep.pre_activation"), accumulator


def function_mlp_up_backward(
    params: GroupedMlpParams, residuals: Any, out_bar: jax.Array, accumulator: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of rows and of w_up, from (rows, experts, group_sizes)."""
    rows, experts, group_sizes = residuals
    w_up, _ = experts.multiplied
    if isinstance(w_up, Quantized):
        to_rows = _to_out(rows.dtype, params)
        return weights_only_lhs_gradient(out_bar, w_up, group_sizes, to_rows), None
    to_out = _to_out(out_bar.dtype, params)
    return matmul_backward(
        to_out, params.accumulation, (rows, w_up, group_sizes), out_bar, accumulator
    )


def function_mlp_down(
    pre_activation: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    function: Callable[[jax.Array], jax.Array],
    params: GroupedMlpParams,
    *,
    keep_activations: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the result [M, H] from the pre-activation, and the accumulator for a later call.

    The result's tail is zeros. Without `keep_activations` the backward pass repeats the function.
    The weight multiplies the activation, so that no output row is kept for its gradient.
    """
    dtype = pre_activation.dtype
    scale = rows_in_groups(group_sizes, pre_activation.shape[0]).astype(jnp.float32)
    if row_weights is not None:
        scale = jnp.where(scale > 0, row_weights, 0)

    def bias_rows(scale: jax.Array, bias: jax.Array) -> jax.Array:
        # A matmul of inner size 1: its gradients sum over each group in a fixed order.
        return grouped_matmul(
            scale[:, None],
            bias[:, None, :],
            group_sizes,
            num_sms=params.num_sms or None,
            implementation=params.implementation,
        )

    def activate(pre_activation: jax.Array, scale: jax.Array, b_up: jax.Array | None) -> jax.Array:
        wide = pre_activation.astype(jnp.float32)
        if b_up is not None:
            wide = wide + bias_rows(jnp.ones_like(scale), b_up)
        activations = function(wide)
        if row_weights is not None:
            activations = activations * scale[:, None]
        return activations.astype(dtype)

    activate = activate if keep_activations else compat.checkpoint(activate)
    activations = activate(pre_activation, scale, experts.b_up)
    y, accumulator = _matmul(
        activations,
        experts.multiplied[1],
        group_sizes,
        experts.accumulators.w_down,
        dtype if experts.b_down is None else jnp.float32,
        params,
    )
    if experts.b_down is not None:
        y = (y + bias_rows(scale, experts.b_down)).astype(dtype)
    return y, accumulator


def _matmul(
    lhs: jax.Array,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    out_dtype: Any,
    params: GroupedMlpParams,
) -> tuple[jax.Array, jax.Array | None]:
    # The function may have made lhs vary over more axes.
    to_out = _to_out(out_dtype, params)
    arrays: Any = compat.vary_together((lhs, rhs, group_sizes, accumulator))
    if isinstance(rhs, Quantized):
        assert accumulator is None
        lhs, quantized, group_sizes, _ = arrays
        return weights_only_matmul(lhs, quantized, group_sizes, to_out), None
    return chained_matmul(*arrays, to_out, params.accumulation)


def _to_out(dtype: Any, params: GroupedMlpParams) -> GroupedMatmulParams:
    # Tails are zeros: the function's own parameters get gradients from all rows.
    return params.matmul(dtype, zero_tail=True)
