"""The two grouped matmuls with an activation in their epilogue: the first forward, one backward.

* grouped_matmul_activation: lhs, rhs, group_sizes, [bias], [row_weights] -> out, [pre_activation]
* grouped_matmul_activation_gradient: out_gradient, rhs, group_sizes, pre_activation, [row_weights]
  -> pre_activation_gradient, activations, row_dots
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.matmul import reference
from jax_ep._src.matmul.activations import NamedActivation, activate, num_outputs
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_matmul, kernel_rhs


def bind_activation(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    params: GroupedMatmulActivationParams,
    *,
    keep_pre_activation: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns row_weights * activation(lhs @ rhs[g] + bias[g]) [M, F], and the pre-activation.

    lhs [M, K], rhs [L, K, N] in lhs's dtype or float32, bias float32[L, N], row_weights float32[M];
    results are in lhs's dtype. The activation reads the rounded pre-activation [M, N], so that a
    backward pass that begins with the kept one computes the same bits. Tails are unspecified. An
    activation with parameters is in no epilogue: a loop of XLA's follows the matmul.
    """
    if not isinstance(params.activation, str):
        without = dataclasses.replace(params, activation="none")
        pre_activation, _ = bind_activation(lhs, rhs, group_sizes, bias, None, without)
        out = activate_apart(params.activation, pre_activation, row_weights)
        return out, pre_activation if keep_pre_activation else None
    optional = [array for array in (bias, row_weights) if array is not None]
    out, *kept = grouped_matmul_activation_p.bind(
        lhs,
        kernel_rhs(lhs, rhs),
        group_sizes,
        *optional,
        params=params,
        has_bias=bias is not None,
        has_row_weights=row_weights is not None,
        keep_pre_activation=keep_pre_activation,
    )
    return out, kept[0] if kept else None


def activate_apart(
    activation: NamedActivation, pre_activation: jax.Array, row_weights: jax.Array | None
) -> jax.Array:
    """Returns what `bind_activation` does, from its rounded pre-activation."""
    # XLA may remove the cast to this dtype and back, but not this.
    wide = lax.optimization_barrier(pre_activation).astype(jnp.float32)
    activations = activate(activation, wide)
    if row_weights is not None:
        activations = activations * row_weights[:, None]
    return activations.astype(pre_activation.dtype)


def bind_activation_gradient(
    out_bar: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    pre_activation: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMatmulActivationParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients between the two matmuls of an MLP in one call.

    out_bar [M, K], rhs [L, F, K] (the down matrices), pre_activation [M, N], row_weights as above.

    Returns:
      The gradient of the pre-activation [M, N] and the weighted intermediate activations [M, F], in
      out_bar's dtype; and float32[M, ceil(F / 128)], whose row sums are this matmul's part of the
      gradients of the row weights. Tails are unspecified.
    """
    if not isinstance(params.activation, str):
        to_activations = GroupedMatmulParams(
            transpose_rhs=True,
            out_dtype=out_bar.dtype,
            zero_tail=False,
            num_sms=params.num_sms,
            implementation=params.implementation,
        )
        activations_bar = bind_matmul(out_bar, rhs, group_sizes, to_activations)
        return activation_gradient_apart(
            activations_bar, group_sizes, pre_activation, row_weights, params
        )
    weights = () if row_weights is None else (row_weights,)
    pre_activation_bar, activations, row_dots = grouped_matmul_activation_gradient_p.bind(
        out_bar,
        kernel_rhs(out_bar, rhs),
        group_sizes,
        pre_activation,
        *weights,
        params=params,
        has_row_weights=row_weights is not None,
    )
    return pre_activation_bar, activations, row_dots


def activation_gradient_apart(
    activations_bar: jax.Array,
    group_sizes: jax.Array,
    pre_activation: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMatmulActivationParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `bind_activation_gradient` does, from the rounded result of its matmul."""
    gradient, activations, row_dots = reference.activation_gradient_epilogue(
        activations_bar,
        group_sizes,
        pre_activation,
        *(() if row_weights is None else (row_weights,)),
        params=params,
        has_row_weights=row_weights is not None,
    )
    return gradient, activations, row_dots


# ---- abstract evaluation


def _activation_avals(
    lhs: Aval,
    rhs: Aval,
    *_: Aval,
    params: GroupedMatmulActivationParams,
    keep_pre_activation: bool,
    **flags: bool,
) -> list[Aval]:
    num_rows, num_columns = lhs.shape[0], rhs.shape[2]
    columns = [num_outputs(params.activation, num_columns), num_columns]
    return [
        compat.aval_like(lhs, (num_rows, n), lhs.dtype) for n in columns[: 1 + keep_pre_activation]
    ]


def _activation_gradient_avals(
    out_bar: Aval, rhs: Aval, group_sizes: Aval, pre_activation: Aval, *_: Aval, **__: Any
) -> list[Aval]:
    num_rows, size = out_bar.shape[0], rhs.shape[1]
    num_dots = -(-size // reference.COLUMNS_PER_DOT)
    return [
        compat.aval_like(out_bar, pre_activation.shape, out_bar.dtype),
        compat.aval_like(out_bar, (num_rows, size), out_bar.dtype),
        compat.aval_like(out_bar, (num_rows, num_dots), jnp.float32),
    ]


# ---- lowering


def _attributes(
    avals: list[Aval], params: GroupedMatmulActivationParams, **flags: bool
) -> dict[str, Any]:
    return {
        "activation": params.activation,
        "num_sms": np.int64(params.num_sms),
        **{name: np.bool_(flag) for name, flag in flags.items()},
    }


def _unsupported(avals: list[Aval], params: GroupedMatmulActivationParams, **_: bool) -> str | None:
    lhs, rhs = avals[0].shape, avals[1].shape
    return primitive.too_many(num_rows=lhs[0], num_groups=rhs[0], matrix_size=max(rhs[1:]))


grouped_matmul_activation_p = primitive.define_primitive(
    "grouped_matmul_activation",
    abstract_eval=_activation_avals,
    reference=reference.grouped_matmul_activation,
    attributes=_attributes,
    unsupported=_unsupported,
)

grouped_matmul_activation_gradient_p = primitive.define_primitive(
    "grouped_matmul_activation_gradient",
    abstract_eval=_activation_gradient_avals,
    reference=reference.grouped_matmul_activation_gradient,
    attributes=_attributes,
    unsupported=_unsupported,
)
