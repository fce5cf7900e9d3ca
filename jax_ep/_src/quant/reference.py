"""Quantizing in plain JAX: the semantic oracle, and what runs where there is no CUDA kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._src.quant.formats import Format
from jax_ep._src.quant.quantized import Quantized, aligned, with_tensor_scale


def quantized(
    x: jax.Array, format: Format, blocks: tuple[int, ...], tensor_scale: jax.Array | None = None
) -> Quantized:
    """Quantizes in blocks of these sizes, one per axis, with computed scales."""
    x = as_float32(x)
    scales = scales_of(x, format, blocks, tensor_scale)
    return with_scales(x, scales, format, blocks, tensor_scale)


def as_float32(x: jax.Array) -> jax.Array:
    """Casts x. The rounding of bfloat16 stays, though XLA may remove a cast to it and back."""
    wide = x.astype(jnp.float32)
    if x.dtype != jnp.bfloat16:
        return wide
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(wide, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def tensor_scale_of(x: jax.Array, format: Format, num_axes: int) -> jax.Array:
    """Returns the scale of the last axes, by their finite values: a NaN is its block's alone."""
    x = as_float32(x)
    magnitudes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    amax = magnitudes.max(tuple(range(x.ndim - num_axes, x.ndim)), initial=format.min_amax)
    largest = float(jnp.finfo(format.dtype).max) * float(jnp.finfo(format.scale_dtype).max)
    return amax * np.float32(1 / largest)


def scales_of(
    x: jax.Array, format: Format, blocks: tuple[int, ...], tensor_scale: jax.Array | None = None
) -> jax.Array:
    # XLA for CPUs may drop a NaN from a maximum.
    amax = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    for axis, block in enumerate(blocks):
        if block > 1:
            amax = _blocked(amax, axis, block).max(axis + 1)
    if tensor_scale is not None:
        # One product, which XLA cannot order otherwise.
        scales = amax * (1 / (float(jnp.finfo(format.dtype).max) * aligned(tensor_scale, x.ndim)))
        info = jnp.finfo(format.scale_dtype)
        scales = jnp.clip(scales, float(info.smallest_subnormal), float(info.max))
        scales = jnp.where(jnp.isfinite(amax), rounded(scales, format.scale_dtype), jnp.nan)
        return scales.astype(format.scale_dtype)
    # XLA would turn a division by a constant into this product.
    scales = jnp.maximum(amax, format.min_amax) * np.float32(1 / float(jnp.finfo(format.dtype).max))
    if format.scale_rounding == "power_of_two":
        # Carries any bit of the mantissa into the exponent. Scales are positive and not subnormal.
        bits = lax.bitcast_convert_type(scales, jnp.int32)
        scales = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(amax), scales, jnp.nan).astype(format.scale_dtype)


def with_scales(
    x: jax.Array,
    scales: jax.Array,
    format: Format,
    blocks: tuple[int, ...],
    tensor_scale: jax.Array | None = None,
) -> Quantized:
    scaled = x * expanded(1 / with_tensor_scale(scales, tensor_scale), x.shape, blocks)
    largest = float(jnp.finfo(format.dtype).max)
    # A cast alone would turn what is too large into NaN or infinity.
    # The scale of a NaN is NaN, so that the value does not matter: four bits have none.
    nan = 0 if jnp.finfo(format.dtype).bits == 4 else jnp.nan
    scaled = jnp.where(jnp.isfinite(x), jnp.clip(scaled, -largest, largest), nan)
    values = rounded(scaled, format.dtype).astype(format.dtype)
    return Quantized(values, scales, format, tensor_scale)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values, which are not too large, to values of an eight-bit dtype.

    XLA may remove a cast to a narrower dtype and back. After this no cast rounds.
    """
    info = jnp.finfo(dtype)
    step = float(info.smallest_subnormal)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, normal)


def _blocked(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Splits an axis into blocks, the last one filled up with zeros."""
    padding = -x.shape[axis] % block
    if padding:
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def expanded(scales: jax.Array, shape: tuple[int, ...], blocks: tuple[int, ...]) -> jax.Array:
    """Repeats each scale over its block."""
    for axis, block in enumerate(blocks):
        if block > 1:
            repeated = (*scales.shape[: axis + 1], block, *scales.shape[axis + 1 :])
            scales = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), repeated)
            scales = lax.collapse(scales, axis, axis + 2)
            scales = lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales
