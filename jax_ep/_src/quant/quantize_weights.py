"""quantize_weights: the matrices of grouped matmuls, in the layouts that their passes read."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from jax_ep._src.core import checks, compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import Format, has_kernels, matrix_scales
from jax_ep._src.quant.quantize import (
    QuantizeParams,
    check_floats,
    quantize_by_xla,
    scale_attributes,
    tensor_scale_for,
    unsupported_floats,
    without_derivative,
)
from jax_ep._src.quant.quantized import Quantized


def quantize_weights(
    w: jax.Array,
    format: Format,
    *,
    transpose_rhs: bool = False,
    scales: Any = None,
    tensor_scale: Any = None,
    implementation: str | None = None,
) -> Quantized:
    """Quantizes the matrices of a grouped matmul with a scale per 128 x 128 values or per channel.

    Values are rounded as in `quantize`. Blocks of 128 x 128 suit both directions, because the
    ``mT`` of the result is w's transpose, quantized; channels belong to one direction.

    A kernel computes the scales and values of blocks in one pass. XLA computes all others, and
    whatever `quantize` leaves to it.

    For example::

        w = quant.quantize_weights(jnp.ones((3, 256, 128)), quant.Fp8Block128())  # scales [3, 2, 1]

    Args:
      w: float[..., K, N], or [..., N, K] with `transpose_rhs`.
      format: `Fp8Block128` or `Fp8Row`.
      transpose_rhs: whether w is [..., N, K], as in `grouped_matmul`. `Fp8Row` has one scale for
        each of the N columns of the result.
      scales: static scales, as in `quantize`.
      tensor_scale: as in `quantize`, but None computes one per matrix.
      implementation: as in `quantize`.

    Returns:
      values of w's shape, and scales [..., ceil(K / 128), ceil(N / 128)] or [..., 1, N]; with
      `transpose_rhs` the last two axes are exchanged.

    Raises:
      The errors of `quantize`.
    """
    operation = "quant.quantize_weights"
    check_floats(operation, "w", w, format, 2)
    implementation = checks.implementation(operation, implementation)
    w = jnp.asarray(w)
    tensor_scale = tensor_scale_for(operation, w, format, 2, tensor_scale, scales is not None)
    if scales is not None or not format.has_square_blocks:
        rows, columns = format.matrix_block
        size = w.shape[-1 if transpose_rhs else -2]
        block = (rows, size if columns is None else columns)
        blocks = block if transpose_rhs else block[::-1]
        return quantize_by_xla(operation, w, format, blocks, scales, tensor_scale)
    (as_given,) = quantize_blocks(
        operation, (w,), format, as_given=True, implementation=implementation
    )
    return as_given


def quantize_blocks(
    operation: str,
    parts: tuple[jax.Array, ...],
    format: Format,
    *,
    as_given: bool = False,
    transposed: bool = False,
    implementation: str | None,
) -> list[Quantized]:
    """Quantizes matrices [..., R, C] in the layouts that are asked for, the one as given first.

    The format has square blocks. Several parts are matrices side by side, whose columns are joined.
    """
    parts = compat.vary_together(tuple(map(jnp.asarray, parts)))
    block, _ = format.matrix_block
    are_alike = len({(part.shape[:-1], part.dtype) for part in parts}) == 1
    if not are_alike or any(part.shape[-1] % block for part in parts[:-1]):
        parts = (jnp.concatenate(parts, axis=-1),)
    parameters: dict[str, Any] = {
        "params": QuantizeParams(implementation),
        "format": format,
        "as_given": as_given,
        "transposed": transposed,
    }

    def compute(*parts: jax.Array) -> list[Quantized]:
        is_partitioned = any(compat.explicit_axes(jax.typeof(part)) for part in parts)
        quantize = _reference if is_partitioned else quantize_weights_p.bind
        results = quantize(*parts, **parameters)
        return [
            Quantized(values, scales, format)
            for values, scales in zip(results[::2], results[1::2], strict=True)
        ]

    return without_derivative(operation, compute, *parts)


# ---- the primitive


def _avals(
    *parts: Aval, params: QuantizeParams, format: Format, as_given: bool, transposed: bool
) -> list[Aval]:
    *leading, rows, _ = parts[0].shape
    columns = sum(part.shape[-1] for part in parts)
    blocks = matrix_scales(format, (rows, columns))
    as_given_avals, transposed_avals = (
        [
            compat.aval_like(parts[0], (*leading, *(rows, columns)[::step]), format.dtype),
            compat.aval_like(parts[0], (*leading, *blocks[::step]), format.scale_dtype),
        ]
        for step in (1, -1)
    )
    return as_given_avals * as_given + transposed_avals * transposed


def _reference(
    *parts: jax.Array, params: QuantizeParams, format: Format, as_given: bool, transposed: bool
) -> list[jax.Array]:
    w = jnp.concatenate(parts, axis=-1)
    block, _ = format.matrix_block
    of_w = reference.quantized(w, format, (*(1,) * (w.ndim - 2), block, block))
    layouts = [of_w] * as_given + [of_w.mT] * transposed
    return [array for layout in layouts for array in (layout.values, layout.scales)]


def _attributes(
    avals: list[Aval], params: QuantizeParams, format: Format, as_given: bool, transposed: bool
) -> dict[str, Any]:
    return {
        "as_given": np.bool_(as_given),
        "transposed": np.bool_(transposed),
        **scale_attributes(format),
    }


def _unsupported(
    avals: list[Aval], params: QuantizeParams, format: Format, **_: bool
) -> str | None:
    *leading, rows, _columns = avals[0].shape
    if not has_kernels(format):
        return f"no kernel quantizes to {format}"
    columns = sum(aval.shape[-1] for aval in avals)
    return unsupported_floats("w", avals[0]) or primitive.too_many(
        num_matrices=math.prod(leading), rows=rows, columns=columns
    )


def _batch(operands: Any, dims: Any, **parameters: Any) -> Any:
    """A batch has more matrices."""
    (size,) = {
        operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None
    }
    parts = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if dim is None
        else jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
    ]
    results = quantize_weights_p.bind(*parts, **parameters)
    return results, (0,) * len(results)


quantize_weights_p = primitive.define_primitive(
    "quantize_weights",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    partitioned_by_xla=True,
)
batching.primitive_batchers[quantize_weights_p] = _batch
