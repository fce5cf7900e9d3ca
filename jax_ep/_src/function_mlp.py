"""The MLP of an activation that is a function: it runs between two plain grouped matmuls.

The function may close over anything, so JAX differentiates the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.experts import Experts
from jax_ep._src.grouped_matmul import grouped_matmul
from jax_ep._src.groups import rows_in_groups
from jax_ep._src.params import GroupedMlpParams


def function_mlp_up(
    rows: jax.Array, w_up: jax.Array, group_sizes: jax.Array, params: GroupedMlpParams
) -> jax.Array:
    """Returns the pre-activation [M, N], without the bias."""
    # Tails are zeros here and below: the function's own parameters get gradients from all rows.
    return grouped_matmul(rows, w_up, group_sizes, **_options(params))


def function_mlp_down(
    pre_activation: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    function: Callable[[jax.Array], jax.Array],
    params: GroupedMlpParams,
    *,
    keep_activations: bool = True,
) -> jax.Array:
    """Returns the result [M, H] from the pre-activation; its tail is zeros.

    Without `keep_activations` the backward pass repeats the function. The weight multiplies the
    activation, so that no output row is kept for its gradient.
    """
    dtype = pre_activation.dtype
    scale = rows_in_groups(group_sizes, pre_activation.shape[0]).astype(jnp.float32)
    if row_weights is not None:
        scale = jnp.where(scale > 0, row_weights, 0)

    def bias_rows(scale: jax.Array, bias: jax.Array) -> jax.Array:
        # A matmul of inner size 1: its gradients sum over each group in a fixed order.
        return grouped_matmul(scale[:, None], bias[:, None, :], group_sizes, **_options(params))

    def activate(pre_activation: jax.Array, scale: jax.Array, b_up: jax.Array | None) -> jax.Array:
        wide = pre_activation.astype(jnp.float32)
        if b_up is not None:
            wide = wide + bias_rows(jnp.ones_like(scale), b_up)
        activations = function(wide)
        if row_weights is not None:
            activations = activations * scale[:, None]
        return activations.astype(dtype)

    activate = activate if keep_activations else jax.checkpoint(activate)
    activations = activate(pre_activation, scale, experts.b_up)
    if experts.b_down is None:
        return grouped_matmul(activations, experts.w_down, group_sizes, **_options(params))
    y = grouped_matmul(
        activations,
        experts.w_down,
        group_sizes,
        preferred_element_type=jnp.float32,
        **_options(params),
    )
    return (y + bias_rows(scale, experts.b_down)).astype(dtype)


def _options(params: GroupedMlpParams) -> dict[str, Any]:
    return {"num_sms": params.num_sms or None, "implementation": params.implementation}
