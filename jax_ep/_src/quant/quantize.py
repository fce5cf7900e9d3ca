"""quantize and dequantize: between float arrays and eight-bit values with scales."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from jax_ep._src.core import checks, compat, primitive
from jax_ep._src.core.compat import Aval
from jax_ep._src.core.errors import ArgumentError, DtypeError, UnavailableError
from jax_ep._src.quant import reference
from jax_ep._src.quant.formats import Format, check_format, has_kernels, num_blocks, row_scales
from jax_ep._src.quant.quantized import (
    Quantized,
    check,
    check_tensor_scale,
    with_tensor_scale,
)

STRAIGHT_THROUGH = (
    "jax.lax.stop_gradient on its operands keeps it out of a derivative, and "
    "jax_ep.quant.fake_quantize has a straight-through gradient"
)
"""What to do about an operation that has no derivative."""


def quantize(
    x: jax.Array,
    format: Format,
    *,
    scales: Any = None,
    tensor_scale: Any = None,
    implementation: str | None = None,
) -> Quantized:
    """Quantizes rows with one scale per row, or per 128 values of it, as the format says.

    A value is x * (1 / scale) in float32, clipped to the largest value of the dtype and rounded to
    nearest even. A NaN or an infinity makes its whole block NaN, or only itself under static
    scales. The call has no derivative.

    A kernel computes scales and values in one pass. XLA computes the values for static scales, and
    everything that it partitions over devices itself, which is outside of `shard_map` in a program
    of several devices. On GPUs XLA's division has an error of up to 2 units in the last place, so a
    product in the middle between two eight-bit values may round to another one than on a CPU.

    For example::

        rows = quant.quantize(x, quant.Fp8Block128())  # values [M, K], scales [M, K / 128]

    Args:
      x: float[..., K].
      format: `Fp8Block128`, `Fp8Row`, or one without kernels: `MxFp8`, `MxFp4` or `NvFp4`.
      scales: static scales, or None to compute them from x. A number is the scale of all values,
        and an array broadcasts to the scales' shape. They are used as given: larger values
        saturate, and `scale_rounding` does not apply.
      tensor_scale: for `NvFp4`, a number or an array as in `Quantized`; None computes it from all
        of x, or is 1 with static scales. Ranks that exchange rows have to give the same one, such
        as that of a calibration or of ``jax.lax.pmax``, because dispatch does not send it.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform and dtype.

    Returns:
      values [..., K], and scales [..., ceil(K / 128)] or [..., 1], by the format's block.

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, or an axis without values.
      DtypeError (a TypeError): x is not an array of floats of at least 16 bits, `format` is not a
        format, or `scales` are not numbers.
      UnavailableError (a NotImplementedError): the call is differentiated, or
        ``implementation="cuda"`` where it cannot run.
    """
    operation = "quant.quantize"
    check_floats(operation, "x", x, format, 1)
    params = QuantizeParams(checks.implementation(operation, implementation))
    x = jnp.asarray(x)
    has_scales = scales is not None
    tensor_scale = tensor_scale_for(operation, x, format, x.ndim, tensor_scale, has_scales)
    if has_scales or compat.explicit_axes(jax.typeof(x)):
        return quantize_by_xla(operation, x, format, _row_blocks(x, format), scales, tensor_scale)

    def bind(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, scales = quantize_p.bind(
            *compat.vary_together(operands), params=params, format=format
        )
        return values, scales

    operands = (x,) if tensor_scale is None else (x, tensor_scale)
    values, block_scales = without_derivative(operation, bind, *operands)
    return Quantized(values, block_scales, format, tensor_scale)


def tensor_scale_for(
    operation: str, x: jax.Array, format: Format, num_axes: int, given: Any, has_scales: bool
) -> jax.Array | None:
    """Returns the scale of tensors of so many axes: given, computed, or 1 with static scales."""
    if given is not None:
        if isinstance(given, int | float):
            given = jnp.float32(given)
        check_tensor_scale(operation, format, x.shape, given)
        return jnp.asarray(given)
    if not format.has_tensor_scale:
        return None
    return jnp.float32(1) if has_scales else reference.tensor_scale_of(x, format, num_axes)


def num_scales(x: Any, format: Format) -> int:
    """Returns the number of scales of a row of x."""
    return num_blocks(x.shape[-1], format.block)


def dequantize(x: Quantized, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Multiplies values by their scales in float32, and rounds once to `dtype`.

    It has no derivative, because the cotangent of eight-bit values would have eight bits.

    For example::

        x = quant.dequantize(quant.quantize(x, quant.Fp8Row()), jnp.float32)

    Args:
      x: quantized values in any format.
      dtype: a float dtype of 16 or 32 bits.

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
    advice = "Use jnp.bfloat16, or jnp.float32 for all bits of the products."
    return dequantize_checked(x, checks.float_dtype("quant.dequantize", "dtype", dtype, advice))


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


# ---- the primitive


@dataclasses.dataclass(frozen=True)
class QuantizeParams:
    """Parameters of quantize; the format is beside them."""

    implementation: str | None


def _row_blocks(x: Any, format: Format) -> tuple[int]:
    return (x.shape[-1] if format.block is None else format.block,)


def _avals(x: Aval, *tensor_scale: Aval, params: QuantizeParams, format: Format) -> list[Aval]:
    return [
        compat.aval_like(x, x.shape, format.dtype),
        compat.aval_like(x, row_scales(format, x.shape), format.scale_dtype),
    ]


def _reference(
    x: jax.Array, *tensor_scale: jax.Array, params: QuantizeParams, format: Format
) -> tuple[jax.Array, ...]:
    blocks = (*(1,) * (x.ndim - 1), *_row_blocks(x, format))
    rows = reference.quantized(x, format, blocks, *tensor_scale)
    return rows.values, rows.scales


def _attributes(avals: list[Aval], params: QuantizeParams, format: Format) -> dict[str, Any]:
    return {
        "scale_block": np.int64(format.block or 0),
        "is_e5m2": np.bool_(format.dtype == jnp.float8_e5m2),
        **scale_attributes(format),
    }


def scale_attributes(format: Format) -> dict[str, Any]:
    """The attributes of kernels that compute scales."""
    return {
        "min_amax": np.float32(format.min_amax),
        "power_of_two_scales": np.bool_(format.scale_rounding == "power_of_two"),
    }


def unsupported_floats(name: str, x: Aval) -> str | None:
    """Why the kernels do not quantize values of this dtype, or None."""
    if x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        return None
    return f"{name} is {x.dtype}; the kernels take bfloat16, float16 and float32"


def _unsupported(avals: list[Aval], params: QuantizeParams, format: Format) -> str | None:
    x, *_ = avals
    if not has_kernels(format):
        return f"no kernel quantizes to {format}"
    return unsupported_floats("x", x) or primitive.too_many(
        num_rows=math.prod(x.shape[:-1]), row_size=x.shape[-1]
    )


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """A batch has more rows, and as many scales of tensors."""
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    results = quantize_p.bind(*operands, **params)
    return results, (0,) * len(results)


quantize_p = primitive.define_primitive(
    "quantize",
    abstract_eval=_avals,
    reference=_reference,
    attributes=_attributes,
    unsupported=_unsupported,
    partitioned_by_xla=True,
)
batching.primitive_batchers[quantize_p] = _batch


# ---- checks, and blocks of any shape


def check_floats(operation: str, name: str, x: Any, format: Any, num_axes: int) -> None:
    """Raises unless x can be quantized in this format along its last axes."""
    checks.array(operation, name, x)
    check_format(operation, format)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {x.dtype}; expected a float dtype. "
            f"Cast it with {name}.astype(jnp.float32)."
        )
    if x.dtype.itemsize < 2:
        raise DtypeError(
            f"jax_ep.{operation}: {name} has dtype {x.dtype}, as quantized values have; expected "
            "16 bits or more. Give values and their scales to jax_ep.quant.Quantized."
        )
    checks.known_sizes(operation, name, x, x.shape[-num_axes:])
    if x.ndim < num_axes or 0 in x.shape[-num_axes:]:
        raise ArgumentError(
            f"jax_ep.{operation}: {name} has shape {x.shape}; expected at least {num_axes} axes, "
            "the last of them not empty. Leave out arrays without values."
        )


def quantize_by_xla(
    operation: str,
    x: jax.Array,
    format: Format,
    blocks: tuple[int, ...],
    scales: Any,
    tensor_scale: jax.Array | None = None,
) -> Quantized:
    """Quantizes in blocks of the last axes, by static scales or computed ones, in plain JAX."""
    leading = x.ndim - len(blocks)
    shape = (
        *x.shape[:leading],
        *(-(-size // block) for size, block in zip(x.shape[leading:], blocks, strict=True)),
    )
    blocks = (*(1,) * leading, *blocks)

    def with_computed(x: jax.Array, *tensor_scale: jax.Array) -> Quantized:
        return reference.quantized(x, format, blocks, *tensor_scale)

    def with_static(x: jax.Array, scales: jax.Array, *tensor_scale: jax.Array) -> Quantized:
        x, scales = reference.as_float32(x), jnp.broadcast_to(scales, shape)
        scales = scales.astype(format.scale_dtype)
        return reference.with_scales(x, scales, format, blocks, *tensor_scale)

    of_tensor = () if tensor_scale is None else (tensor_scale,)
    if scales is None:
        return without_derivative(operation, with_computed, x, *of_tensor)
    scales = _static_scales(operation, scales)
    if jnp.broadcast_shapes(scales.shape, shape) != shape:
        raise ArgumentError(
            f"jax_ep.{operation}: scales have shape {scales.shape}; expected one that broadcasts "
            f"to {shape}. Give one scale, or None to compute them."
        )
    return without_derivative(operation, with_static, x, scales, *of_tensor)


def _static_scales(operation: str, scales: Any) -> jax.Array:
    try:
        return jnp.asarray(scales, jnp.float32)
    except (TypeError, ValueError) as error:
        raise DtypeError(
            f"jax_ep.{operation}: scales are a {type(scales).__name__}; expected a number, or an "
            "array of numbers. Give the scales alone, or None to compute them."
        ) from error


def dequantize_checked(x: Quantized, dtype: Any) -> jax.Array:
    """Dequantizes arrays that are checked, whose scales may have been cast to float32 since."""

    def dequantize(x: Quantized) -> jax.Array:
        scales = with_tensor_scale(x.scales, x.tensor_scale)
        scales = reference.expanded(scales, x.shape, x.block_shape)
        return (x.values.astype(jnp.float32) * scales).astype(dtype)

    return without_derivative("quant.dequantize", dequantize, x)
