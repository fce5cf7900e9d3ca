"""The grouped matmul of quantized operands with a gated activation, whose results are quantized.

grouped_matmul_quantized_activation: lhs, lhs_scales, rhs, rhs_scales, group_sizes, [row_weights]
-> out, out_scales, [pre_activation]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src.core import compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.matmul.activations import GATED_ACTIVATIONS, NamedActivation, activate
from jax_ep._src.matmul.grouped_matmul_quantized import (
    Formats,
    bind_quantized,
    unsupported_operands,
)
from jax_ep._src.matmul.params import GroupedMatmulActivationParams, GroupedMatmulParams
from jax_ep._src.quant.formats import BLOCK, Format, has_kernels
from jax_ep._src.quant.quantize import quantize
from jax_ep._src.quant.quantized import Quantized

PRE_ACTIVATION_DTYPE = jnp.dtype(jnp.bfloat16)
MIN_AMAX = 1e-4
"""The least magnitude of a block for which the epilogue makes a scale."""


def has_quantized_activation(
    lhs: Quantized, rhs: Quantized, activation: NamedActivation, dtype: Any
) -> bool:
    """Whether `bind_quantized_activation` takes these: gate and up in whole blocks, in bfloat16."""
    return (
        activation in GATED_ACTIVATIONS
        and dtype == PRE_ACTIVATION_DTYPE
        and all(map(_has_epilogue, (lhs.format, rhs.format)))
        and lhs.format.min_amax == MIN_AMAX
        and rhs.shape[1] % (2 * BLOCK) == 0
        and rhs.shape[1] > 0
    )


def _has_epilogue(format: Format) -> bool:
    return format.matrix_block == (BLOCK, BLOCK) and has_kernels(format)


def bind_quantized_activation(
    lhs: Quantized,
    rhs: Quantized,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    params: GroupedMatmulActivationParams,
    *,
    keep_pre_activation: bool = False,
) -> tuple[Quantized, jax.Array | None]:
    """Returns row_weights * activation(lhs @ rhs[g].T) [M, F] in lhs's format; the pre-activation.

    lhs [M, K], rhs [L, 2F, K], row_weights float32[M]. The activation is computed in float32 from
    the sums, and quantized as `quantize` does. The pre-activation is rounded to bfloat16. Tails are
    unspecified.
    """
    weights = () if row_weights is None else (row_weights,)
    values, scales, *kept = grouped_matmul_quantized_activation_p.bind(
        lhs.values,
        lhs.scales,
        rhs.values,
        rhs.scales,
        group_sizes,
        *weights,
        params=params,
        formats=(lhs.format, rhs.format),
        has_row_weights=row_weights is not None,
        keep_pre_activation=keep_pre_activation,
    )
    return Quantized(values, scales, lhs.format), kept[0] if kept else None


# ---- the primitive


def _avals(
    lhs: Aval,
    lhs_scales: Aval,
    rhs: Aval,
    *_: Aval,
    params: GroupedMatmulActivationParams,
    formats: Formats,
    has_row_weights: bool,
    keep_pre_activation: bool,
) -> list[Aval]:
    rows, columns = lhs.shape[0], rhs.shape[1]
    results = [
        compat.aval_like(lhs, (rows, columns // 2), formats[0].dtype),
        compat.aval_like(lhs, (rows, columns // 2 // BLOCK), jnp.float32),
        compat.aval_like(lhs, (rows, columns), PRE_ACTIVATION_DTYPE),
    ]
    return results[: 2 + keep_pre_activation]


def _matmul_then_activation(
    *operands: jax.Array,
    params: GroupedMatmulActivationParams,
    formats: Formats,
    has_row_weights: bool,
    keep_pre_activation: bool,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Three operations; `dtype` is that of what is between the first and the second."""
    lhs, lhs_scales, rhs, rhs_scales, group_sizes, *row_weights = operands
    matmul = GroupedMatmulParams(
        transpose_rhs=True,
        out_dtype=dtype,
        zero_tail=False,
        num_sms=params.num_sms,
        implementation=params.implementation,
    )
    pre_activation = bind_quantized(
        Quantized(lhs, lhs_scales, formats[0]),
        Quantized(rhs, rhs_scales, formats[1]),
        group_sizes,
        matmul,
    )
    activations = activate(params.activation, pre_activation.astype(jnp.float32))
    if has_row_weights:
        activations = activations * row_weights[0][:, None]
    out = quantize(activations, formats[0], implementation="xla")  # fused with the activation
    results = (out.values, out.scales, pre_activation.astype(PRE_ACTIVATION_DTYPE))
    return results[: 2 + keep_pre_activation]


def _reference(*operands: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    return _matmul_then_activation(*operands, **parameters, dtype=jnp.dtype(jnp.float32))


def _in_bfloat16(*operands: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    return _matmul_then_activation(*operands, **parameters, dtype=PRE_ACTIVATION_DTYPE)


def _attributes(
    avals: list[Aval],
    params: GroupedMatmulActivationParams,
    formats: Formats,
    has_row_weights: bool,
    keep_pre_activation: bool,
) -> dict[str, Any]:
    return {
        "activation": params.activation,
        "has_row_weights": np.bool_(has_row_weights),
        "keep_pre_activation": np.bool_(keep_pre_activation),
        "power_of_two_scales": np.bool_(formats[0].scale_rounding == "power_of_two"),
        "num_sms": np.int64(params.num_sms),
    }


def _unsupported(
    avals: list[Aval], params: GroupedMatmulActivationParams, formats: Formats, **_: bool
) -> str | None:
    return unsupported_operands(avals[:5], formats)


grouped_matmul_quantized_activation_p = primitive.define_primitive(
    "grouped_matmul_quantized_activation",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    fallback=primitive.Fallback("runs as a matmul and an activation on CUDA", _in_bfloat16),
)
