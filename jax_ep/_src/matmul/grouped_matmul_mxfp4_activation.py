"""grouped_matmul_activation of float rows and constant MXFP4 weights.

grouped_matmul_mxfp4_activation: lhs, rhs, rhs_scales, group_sizes, [bias], [row_weights]
  -> out, [pre_activation]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.matmul import reference
from jax_ep._src.matmul.activations import ClampedSwiGlu, has_gate, num_outputs
from jax_ep._src.matmul.grouped_matmul_activation import activate_apart, bind_activation
from jax_ep._src.matmul.grouped_matmul_mxfp4 import unsupported_operands
from jax_ep._src.matmul.grouped_matmul_quantized import unsupported_gpus
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams
from jax_ep._src.quant.formats import Format
from jax_ep._src.quant.quantize import dequantize
from jax_ep._src.quant.quantized import Quantized


def bind_weights_only_activation(
    lhs: jax.Array,
    rhs: Quantized,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    row_weights: jax.Array | None,
    params: GroupedMatmulActivationParams,
    *,
    keep_pre_activation: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Does `bind_activation` with quantized matrices [L, N, K].

    The kernel's epilogue has gated activations. A loop of XLA's computes others after the matmul.
    """
    if not (params.activation == "none" or has_gate(params.activation)):
        without = dataclasses.replace(params, activation="none")
        pre_activation, _ = bind_weights_only_activation(lhs, rhs, group_sizes, bias, None, without)
        out = activate_apart(params.activation, pre_activation, row_weights)
        return out, pre_activation if keep_pre_activation else None
    optional = [array for array in (bias, row_weights) if array is not None]
    out, *kept = grouped_matmul_mxfp4_activation_p.bind(
        lhs,
        rhs.values,
        rhs.scales,
        group_sizes,
        *optional,
        params=params,
        format=rhs.format,
        has_bias=bias is not None,
        has_row_weights=row_weights is not None,
        keep_pre_activation=keep_pre_activation,
    )
    return out, kept[0] if kept else None


# ---- the primitive


def _avals(
    lhs: Aval,
    rhs: Aval,
    *_: Aval,
    params: GroupedMatmulActivationParams,
    keep_pre_activation: bool,
    **others: Any,
) -> list[Aval]:
    num_rows, num_columns = lhs.shape[0], rhs.shape[1]
    columns = [num_outputs(params.activation, num_columns), num_columns]
    return [
        compat.aval_like(lhs, (num_rows, n), lhs.dtype) for n in columns[: 1 + keep_pre_activation]
    ]


def _reference(
    lhs: jax.Array,
    rhs: jax.Array,
    rhs_scales: jax.Array,
    group_sizes: jax.Array,
    *optional: jax.Array,
    params: GroupedMatmulActivationParams,
    format: Format,
    **flags: bool,
) -> tuple[jax.Array, ...]:
    """Multiplies by the dequantized weights, in lhs's dtype."""
    weights = dequantize(Quantized(rhs, rhs_scales, format), lhs.dtype)
    matmul = GroupedMatmulParams(True, jnp.dtype(jnp.float32), False, 0, "xla")
    (accumulators,) = reference.grouped_matmul(lhs, weights, group_sizes, params=matmul)
    return reference.activation_epilogue(
        accumulators, group_sizes, *optional, dtype=lhs.dtype, params=params, **flags
    )


def _by_float_kernel(
    lhs: jax.Array,
    rhs: jax.Array,
    rhs_scales: jax.Array,
    group_sizes: jax.Array,
    *optional: jax.Array,
    params: GroupedMatmulActivationParams,
    format: Format,
    has_bias: bool,
    has_row_weights: bool,
    keep_pre_activation: bool,
) -> tuple[jax.Array, ...]:
    """Dequantizes the weights to lhs's dtype, and multiplies by its kernel."""
    out, pre_activation = bind_activation(
        lhs,
        dequantize(Quantized(rhs, rhs_scales, format), lhs.dtype).mT,
        group_sizes,
        optional[0] if has_bias else None,
        optional[-1] if has_row_weights else None,
        params,
        keep_pre_activation=keep_pre_activation,
    )
    return (out,) if pre_activation is None else (out, pre_activation)


def _attributes(
    avals: list[Aval], params: GroupedMatmulActivationParams, format: Format, **flags: bool
) -> dict[str, Any]:
    activation = params.activation
    clamped = activation if isinstance(activation, ClampedSwiGlu) else None
    return {
        "activation": "swiglu" if clamped else activation,
        "limit": np.float32(clamped.limit if clamped else 0),
        "alpha": np.float32(clamped.alpha if clamped else 0),
        "num_sms": np.int64(params.num_sms),
        **{name: np.bool_(flag) for name, flag in flags.items()},
    }


def _unsupported(
    avals: list[Aval], params: GroupedMatmulActivationParams, format: Format, **_: bool
) -> str | None:
    columns = num_outputs(params.activation, avals[1].shape[1])
    return unsupported_gpus("four-bit weights") or unsupported_operands(avals[:4], format, columns)


grouped_matmul_mxfp4_activation_p = primitive.define_primitive(
    "grouped_matmul_mxfp4_activation",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    fallback=primitive.Fallback("dequantizes its weights on CUDA", _by_float_kernel),
)
