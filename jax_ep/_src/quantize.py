"""quantize and dequantize: between float arrays and eight-bit values with scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep._src import checks
from jax_ep._src.errors import ArgumentError, DtypeError, UnavailableError
from jax_ep._src.quantized import BLOCK, Format, Fp8Block128, Quantized, check

STRAIGHT_THROUGH = (
    "jax.lax.stop_gradient on its operands keeps it out of a derivative, and "
    "jax_ep.quant.fake_quantize has a straight-through gradient"
)
"""What to do about an operation that has no derivative."""


def quantize(x: jax.Array, format: Format, *, scales: Any = None) -> Quantized:
    """Quantizes rows: one scale per row, or per 128 values of it, as the format says.

    A value is x * (1 / scale) in float32, clipped to the largest value of the dtype and rounded to
    nearest even. A NaN or an infinity makes its whole block NaN. It has no derivative.

    On GPUs XLA divides with an error of up to 2 units in the last place. So a product in the middle
    between two eight-bit values may round to another one than on a CPU.

    Args:
      x: float[..., K].
      format: `Fp8Block128` or `Fp8Row`.
      scales: static scales, or None to compute them from x. A number is the scale of all values,
        and an array broadcasts to the scales' shape. They are taken as they are: larger values
        saturate, and `scale_rounding` has no part in it.

    Returns:
      values [..., K], and scales [..., ceil(K / 128)] or [..., 1].

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, or an axis without values.
      DtypeError (a TypeError): x is no float array, or `format` is no format.
      UnavailableError (a NotImplementedError): it is differentiated.
    """
    check_floats("quant.quantize", "x", x, format, 1)
    blocks = (BLOCK if isinstance(format, Fp8Block128) else x.shape[-1],)
    return _quantized("quant.quantize", x, format, blocks, scales)


def quantize_weights(
    w: jax.Array, format: Format, *, transpose_rhs: bool = False, scales: Any = None
) -> Quantized:
    """Quantizes the matrices of a grouped matmul: a scale per 128 x 128 values, or per channel.

    Values are rounded as in `quantize`. Blocks of 128 x 128 suit both directions: the ``mT`` of the
    result is w's transpose, quantized. Channels belong to one direction.

    Args:
      w: float[..., K, N], or [..., N, K] with `transpose_rhs`.
      format: `Fp8Block128` or `Fp8Row`.
      transpose_rhs: whether w is [..., N, K], as in `grouped_matmul`. `Fp8Row` has one scale for
        each of the N columns of the result.
      scales: static scales, as in `quantize`.

    Returns:
      values of w's shape, and scales [..., ceil(K / 128), ceil(N / 128)] or [..., 1, N]; with
      `transpose_rhs` the last two axes are exchanged.

    Raises:
      The errors of `quantize`.
    """
    check_floats("quant.quantize_weights", "w", w, format, 2)
    if isinstance(format, Fp8Block128):
        blocks = (BLOCK, BLOCK)
    else:
        blocks = (1, w.shape[-1]) if transpose_rhs else (w.shape[-2], 1)
    return _quantized("quant.quantize_weights", w, format, blocks, scales)


def dequantize(x: Quantized, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Multiplies values by their scales in float32, and rounds once to `dtype`.

    It has no derivative: the cotangent of eight-bit values would have eight bits.

    Args:
      x: of either format.
      dtype: a float dtype.

    Returns:
      [...] in `dtype`.

    Raises:
      The errors of `quantize`.
    """
    if not isinstance(x, Quantized):
        raise DtypeError(
            f"jax_ep.quant.dequantize: x is a {type(x).__name__}; expected a "
            "jax_ep.quant.Quantized. Give what jax_ep.quant.quantize returned."
        )
    check("quant.dequantize", x)
    return _dequantize(x, jnp.dtype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def fake_quantize(x: jax.Array, format: Format) -> jax.Array:
    """Rounds rows to what a format can hold; the gradient is straight-through.

    The result is ``dequantize(quantize(x, format))`` in x's dtype. Its derivative is that of the
    identity, also where values saturate: the usual choice of quantization-aware training.

    Args:
      x: float[..., K].
      format: as in `quantize`.

    Returns:
      [..., K] in x's dtype.
    """
    return dequantize(quantize(x, format), x.dtype)


@fake_quantize.defjvp
def _fake_quantize_jvp(format: Format, primals: Any, tangents: Any) -> Any:
    return fake_quantize(*primals, format), tangents[0]


def without_derivative(operation: str, function: Any, *arguments: Any) -> Any:
    """Returns function(*arguments); raises what to do instead if that is differentiated."""

    @jax.custom_jvp
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    @call.defjvp
    def _raise(primals: Any, tangents: Any) -> Any:
        raise UnavailableError(
            f"jax_ep.{operation}: it has no derivative, because eight-bit cotangents would break "
            f"gradients in silence; expected a call that is not differentiated. {STRAIGHT_THROUGH}."
        )

    return call(*arguments)


# ---- rounding


def check_floats(operation: str, name: str, x: Any, format: Any, num_axes: int) -> None:
    """Raises unless x can be quantized in this format along its last axes."""
    checks.array(operation, name, x)
    if not isinstance(format, Format):
        raise DtypeError(
            f"jax_ep.{operation}: format={format!r}; expected a jax_ep.quant.Fp8Block128 or "
            "Fp8Row. Formats are values: call the class, as in Fp8Block128()."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {x.dtype}; expected a float dtype. "
            f"Cast it with {name}.astype(jnp.float32)."
        )
    if x.ndim < num_axes or 0 in x.shape[-num_axes:]:
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {x.shape}; expected at least {num_axes} axes, "
            "the last of them not empty. Leave out arrays without values."
        )


def _quantized(
    operation: str, x: jax.Array, format: Format, blocks: tuple[int, ...], scales: Any
) -> Quantized:
    """Quantizes in blocks of the last axes."""
    leading = x.ndim - len(blocks)
    shape = (
        *x.shape[:leading],
        *(-(-size // block) for size, block in zip(x.shape[leading:], blocks, strict=True)),
    )
    blocks = (*(1,) * leading, *blocks)

    def with_computed(x: jax.Array) -> Quantized:
        x = _as_float32(x)
        return _with_scales(x, _scales(x, format, blocks), format, blocks)

    def with_static(x: jax.Array, scales: jax.Array) -> Quantized:
        return _with_scales(_as_float32(x), jnp.broadcast_to(scales, shape), format, blocks)

    if scales is None:
        return without_derivative(operation, with_computed, x)
    scales = jnp.asarray(scales, jnp.float32)
    if jnp.broadcast_shapes(scales.shape, shape) != shape:
        raise ArgumentError(
            f"jax_ep.{operation}: scales have shape {scales.shape}; expected one that broadcasts "
            f"to {shape}. Give one scale, or None to compute them."
        )
    return without_derivative(operation, with_static, x, scales)


def _as_float32(x: jax.Array) -> jax.Array:
    """Casts x. The rounding of bfloat16 stays, though XLA may remove a cast to it and back."""
    wide = x.astype(jnp.float32)
    if x.dtype != jnp.bfloat16:
        return wide
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(wide, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _scales(x: jax.Array, format: Format, blocks: tuple[int, ...]) -> jax.Array:
    # XLA for CPUs may drop a NaN from a maximum.
    amax = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    for axis, block in enumerate(blocks):
        if block > 1:
            amax = _blocked(amax, axis, block).max(axis + 1)
    # XLA would turn a division by a constant into this product.
    scales = jnp.maximum(amax, format.min_amax) * np.float32(1 / float(jnp.finfo(format.dtype).max))
    if format.scale_rounding == "power_of_two":
        # Carries any bit of the mantissa into the exponent. Scales are positive and not subnormal.
        bits = lax.bitcast_convert_type(scales, jnp.int32)
        scales = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(amax), scales, jnp.nan)


def _with_scales(
    x: jax.Array, scales: jax.Array, format: Format, blocks: tuple[int, ...]
) -> Quantized:
    scaled = x * _expanded(1 / scales, x.shape, blocks)
    largest = float(jnp.finfo(format.dtype).max)
    # A cast alone would turn what is too large into NaN or infinity.
    scaled = jnp.where(jnp.isfinite(x), jnp.clip(scaled, -largest, largest), jnp.nan)
    return Quantized(_rounded(scaled, format.dtype).astype(format.dtype), scales, format)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values, which are not too large, to values of an eight-bit dtype.

    XLA may remove a cast to a narrower dtype and back. After this no cast rounds.
    """
    info = jnp.finfo(dtype)
    step = float(info.smallest_subnormal)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, normal)


def _dequantize(x: Quantized, dtype: Any) -> jax.Array:
    def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
        scales = _expanded(scales, x.shape, x.block_shape)
        return (values.astype(jnp.float32) * scales).astype(dtype)

    return without_derivative("quant.dequantize", dequantize, x.values, x.scales)


def _blocked(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Splits an axis into blocks, the last one filled up with zeros."""
    padding = -x.shape[axis] % block
    if padding:
        x = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])


def _expanded(scales: jax.Array, shape: tuple[int, ...], blocks: tuple[int, ...]) -> jax.Array:
    """Repeats each scale over its block."""
    for axis, block in enumerate(blocks):
        if block > 1:
            repeated = (*scales.shape[: axis + 1], block, *scales.shape[axis + 1 :])
            scales = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), repeated)
            scales = scales.reshape(*repeated[:axis], -1, *repeated[axis + 2 :])
            scales = lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales
