"""Matmuls of experts whose matrices may be quantized in memory only, forward and of derivatives.

The kernels read those in four bits. Float matrices are dequantized for what they do not compute.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.matmul import reference
from jax_ep._src.matmul.activations import NamedActivation
from jax_ep._src.matmul.grouped_matmul_activation import (
    activation_gradient_apart,
    bind_activation,
    bind_activation_gradient,
)
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_lhs_gradient, weights_only_matmul
from jax_ep._src.matmul.grouped_matmul_mxfp4_activation import bind_weights_only_activation
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_matmul
from jax_ep._src.mlp.params import GroupedMlpParams
from jax_ep._src.quant.microscaling import MxFp4
from jax_ep._src.quant.quantize import dequantize
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedExperts

EPILOGUE_ROWS = 4096
"""Fewer are multiplied by the plain kernel, with float32 results, which a loop of XLA's activates.

On an H200 that is 4 to 7 % faster for 16 to 256 rows of gpt-oss's experts, and as fast for 1024.
4096 rows take 6 % longer.
"""


def kernel_weights(rows: jax.Array, quantized: QuantizedExperts) -> QuantizedExperts | None:
    """Returns matrices that a kernel multiplies by such rows, or None: dequantized ones are.

    A call that the kernel does not take for another reason warns of it.
    """
    if rows.dtype != jnp.bfloat16:
        return None
    is_mxfp4 = all(isinstance(one.forward.format, MxFp4) for one in quantized)
    return quantized if is_mxfp4 else None


def dequantized(quantized: QuantizedExperts, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns w_up [L, H, N] and w_down [L, F, H]."""
    up, down = (dequantize(one.forward, dtype).mT for one in quantized)
    return up, down


def multiply(
    lhs: jax.Array,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
) -> jax.Array:
    """Binds the matmul of float matrices [L, K, N], or of quantized ones [L, N, K]."""
    if isinstance(rhs, Quantized):
        return weights_only_matmul(lhs, rhs, group_sizes, params)
    return bind_matmul(lhs, rhs, group_sizes, params)


def lhs_gradient(
    out_bar: jax.Array,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
) -> jax.Array:
    """Binds the gradient of `multiply`'s lhs, with its rhs."""
    if isinstance(rhs, Quantized):
        return weights_only_lhs_gradient(out_bar, rhs, group_sizes, params)
    transposed = dataclasses.replace(params, transpose_rhs=True)
    return bind_matmul(out_bar, rhs, group_sizes, transposed)


def multiply_and_activate(
    lhs: jax.Array,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
    activation: NamedActivation,
    *,
    keep_pre_activation: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Does `bind_activation`, also with quantized matrices [L, N, K]."""
    optional = (bias, row_weights, params.epilogue(activation))
    if isinstance(rhs, Quantized) and lhs.shape[0] < EPILOGUE_ROWS:
        out, *kept = reference.activation_epilogue(
            weights_only_matmul(lhs, rhs, group_sizes, params.matmul(jnp.float32)),
            group_sizes,
            *(array for array in (bias, row_weights) if array is not None),
            dtype=lhs.dtype,
            params=params.epilogue(activation),
            has_bias=bias is not None,
            has_row_weights=row_weights is not None,
            keep_pre_activation=keep_pre_activation,
        )
        return out, kept[0] if kept else None
    if isinstance(rhs, Quantized):
        return bind_weights_only_activation(
            lhs, rhs, group_sizes, *optional, keep_pre_activation=keep_pre_activation
        )
    return bind_activation(
        lhs, rhs, group_sizes, *optional, keep_pre_activation=keep_pre_activation
    )


def activation_gradient(
    out_bar: jax.Array,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    pre_activation: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMlpParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does `bind_activation_gradient`, also with quantized matrices [L, N, K]."""
    others = (group_sizes, pre_activation, row_weights, params.epilogue(params.activation))
    if isinstance(rhs, Quantized):
        to_activations = params.matmul(out_bar.dtype)
        activations_bar = weights_only_lhs_gradient(out_bar, rhs, group_sizes, to_activations)
        return activation_gradient_apart(activations_bar, *others)
    return bind_activation_gradient(out_bar, rhs, *others)
