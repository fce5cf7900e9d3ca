"""grouped_matmul: one matmul for each group of consecutive rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src import checks, compat, primitive
from jax_ep._src.accumulation import Accumulation, pass_on
from jax_ep._src.compat import Aval
from jax_ep._src.errors import ArgumentError
from jax_ep._src.layer_stack import (
    LayerIndex,
    check_index,
    check_no_layer,
    flatten,
    sizes_in_stack,
)
from jax_ep._src.params import GroupedMatmulParams
from jax_ep._src.quantized import Quantized
from jax_ep._src.recipe import QuantizedWeights, Recipe, check_no_quantized_weights
from jax_ep._src.reference import matmul as reference

CAST_ROWS = 64
"""Average rows per group above which a float32 matrix is cast before the product."""


def grouped_matmul(
    lhs: jax.Array | Quantized,
    rhs: jax.Array | Quantized,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    layer: LayerIndex | None = None,
    zero_tail: bool = True,
    quantization: Recipe | None = None,
    quantized_rhs: QuantizedWeights | None = None,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each group of rows of `lhs` by its own matrix, as `jax.lax.ragged_dot` does.

    Accumulators are float32. It is not a collective: it works inside and outside `shard_map`.

    Args:
      lhs: [M, K] bfloat16, float16 or float32.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; of lhs's dtype, or float32 (master
        weights). A float32 rhs is rounded to lhs's dtype, and its gradient is float32 straight from
        the accumulators. Or both lhs and rhs are `jax_ep.quant.Quantized`, of either format; then
        the call has no derivative.
      group_sizes: integer[G], on the device; group g is the next group_sizes[g] rows. Negative
        sizes count as 0, and rows past M are ignored.
      transpose_rhs: whether rhs is [G, N, K]; nothing is copied.
      preferred_element_type: dtype of the result, lhs's dtype or float32; None is lhs's dtype.
        With quantized operands bfloat16 or float32; None is bfloat16.
      layer: an int, or an integer scalar on the device such as the index of a scan. rhs then is a
        stack [layers, G, K, N], of which this layer is read in place. The gradient is that of the
        stack: zeros for other layers.
      zero_tail: whether the rows past the last group are zeros, in the result and in the gradient
        of lhs. False leaves them unspecified. The tails of lhs and of cotangents are never read.
      quantization: a `jax_ep.quant.Recipe`, by which lhs, rhs and the cotangent are quantized
        inside of the call and of its derivative. lhs is bfloat16 or float32.
      quantized_rhs: rhs after `jax_ep.quant.quantize_for_training` by the same recipe; None
        quantizes it in every call, and in its derivative. Only the derivative is of rhs itself,
        which is not read then.
      num_sms: the most SMs that the call uses on CUDA; None chooses. GPUs of compute capability 9.0
        use them in pairs: odd numbers are rounded down, 1 is rounded up.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [M, N].

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, or an operand sharded over an Explicit
        mesh axis.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run, or
        the derivative of a call with quantized operands.
    """
    operation = "grouped_matmul"
    if quantization is None:
        check_no_quantized_weights(operation, "quantized_rhs", quantized_rhs)
    if isinstance(lhs, Quantized) or isinstance(rhs, Quantized) or quantization is not None:
        check_no_layer(operation, layer)
    if isinstance(lhs, Quantized) or isinstance(rhs, Quantized):
        from jax_ep._src.grouped_matmul_quantized import grouped_matmul_quantized  # built on this

        if quantization is not None:
            raise ArgumentError(
                f"jax_ep.{operation}: quantization is given with quantized operands; expected "
                "float arrays with it. Leave it out, or give the arrays before they were quantized."
            )

        return grouped_matmul_quantized(
            lhs,
            rhs,
            group_sizes,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            zero_tail=zero_tail,
            num_sms=num_sms,
            implementation=implementation,
        )
    checks.rows(operation, "lhs", lhs, ("rows", "K"))
    group_sizes = checks.group_sizes(operation, group_sizes)
    layers = () if layer is None else ("layers",)
    matrix = ("N", lhs.shape[1]) if transpose_rhs else (lhs.shape[1], "N")
    checks.shape(operation, "rhs", rhs, (*layers, group_sizes.shape[0], *matrix))
    if layer is not None:
        index = check_index(operation, layer, rhs.shape[0])
        group_sizes = sizes_in_stack(group_sizes, rhs.shape[0], index)
        rhs = flatten(rhs)
    checks.matrix_dtype(operation, "rhs", rhs, "lhs", lhs)
    params = GroupedMatmulParams(
        transpose_rhs=transpose_rhs,
        out_dtype=checks.out_dtype(operation, lhs, preferred_element_type),
        zero_tail=zero_tail,
        num_sms=checks.num_sms(operation, num_sms),
        implementation=checks.implementation(operation, implementation),
    )
    if quantization is not None:
        from jax_ep._src.grouped_matmul_recipe import grouped_matmul_by_recipe  # built on this

        return grouped_matmul_by_recipe(lhs, rhs, group_sizes, quantized_rhs, quantization, params)
    lhs, rhs, group_sizes = compat.vary_together((lhs, rhs, group_sizes))
    with jax.named_scope("jax_ep.grouped_matmul"):
        return chained_matmul(lhs, rhs, group_sizes, None, params, Accumulation.NONE)[0]


# ---- abstract evaluation


def _grouped_matmul_avals(
    lhs: Aval, rhs: Aval, group_sizes: Aval, *, params: GroupedMatmulParams
) -> list[Aval]:
    num_columns = rhs.shape[1 if params.transpose_rhs else 2]
    return [compat.aval_like(lhs, (lhs.shape[0], num_columns), params.out_dtype)]


def _rhs_gradient_avals(
    lhs: Aval,
    out_bar: Aval,
    group_sizes: Aval,
    *accumulator: Aval,
    params: GroupedMatmulParams,
    has_accumulator: bool,
) -> list[Aval]:
    matrix = (lhs.shape[1], out_bar.shape[1])
    shape = (group_sizes.shape[0], *(matrix[::-1] if params.transpose_rhs else matrix))
    result = compat.aval_like(lhs, shape, params.out_dtype)
    assert all(a.shape == shape and a.dtype == result.dtype == jnp.float32 for a in accumulator)
    return [result]


# ---- lowering


def _attributes(avals: list[Aval], params: GroupedMatmulParams) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(params.num_sms),
    }


def _rhs_gradient_attributes(
    avals: list[Aval], params: GroupedMatmulParams, has_accumulator: bool
) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "has_accumulator": np.bool_(has_accumulator),
        "num_sms": np.int64(params.num_sms),
    }


def _rhs_gradient_aliases(params: GroupedMatmulParams, has_accumulator: bool) -> dict[int, int]:
    return {3: 0} if has_accumulator else {}


def _unsupported(avals: list[Aval], params: GroupedMatmulParams, **_: bool) -> str | None:
    lhs, other, group_sizes = (aval.shape for aval in avals[:3])
    return primitive.too_many(
        num_rows=lhs[0], num_groups=group_sizes[0], matrix_size=max(lhs[1], *other[1:])
    )


grouped_matmul_p = primitive.define_primitive(
    "grouped_matmul",
    abstract_eval=_grouped_matmul_avals,
    reference=reference.grouped_matmul,
    attributes=_attributes,
    unsupported=_unsupported,
)

grouped_matmul_rhs_gradient_p = primitive.define_primitive(
    "grouped_matmul_rhs_gradient",
    abstract_eval=_rhs_gradient_avals,
    reference=reference.grouped_matmul_rhs_gradient,
    attributes=_rhs_gradient_attributes,
    unsupported=_unsupported,
    aliases=_rhs_gradient_aliases,
)


# ---- binding, for the derivatives of this and other modules


def bind_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, params: GroupedMatmulParams
) -> jax.Array:
    """Binds grouped_matmul, with rhs in the dtype that its kernel reads best."""
    (out,) = grouped_matmul_p.bind(lhs, kernel_rhs(lhs, rhs), group_sizes, params=params)
    return out


def bind_rhs_gradient(
    lhs: jax.Array,
    out_bar: jax.Array,
    group_sizes: jax.Array,
    params: GroupedMatmulParams,
    accumulator: jax.Array | None = None,
) -> jax.Array:
    """Binds grouped_matmul_rhs_gradient. An accumulator requires a float32 result."""
    (rhs_bar,) = grouped_matmul_rhs_gradient_p.bind(
        lhs,
        out_bar,
        group_sizes,
        *(() if accumulator is None else (accumulator,)),
        params=params,
        has_accumulator=accumulator is not None,
    )
    return rhs_bar


def kernel_rhs(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Casts a float32 rhs to lhs's dtype where that is faster; the kernel rounds to it anyway.

    With many rows per group, the kernel for 16-bit operands makes up for the cast. With few, the
    matmul is bound by reading the matrices, and a cast would read them once more.
    """
    return rhs.astype(lhs.dtype) if lhs.shape[0] > CAST_ROWS * rhs.shape[0] else rhs


# ---- derivative: two grouped matmuls over the same groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chained_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
    accumulation: Accumulation,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the product, and the stand-in for rhs's accumulator if a later call takes it."""
    out = bind_matmul(lhs, rhs, group_sizes, params)
    return out, pass_on(accumulator, out) if accumulation.passes_on else None


def matmul_backward(
    params: GroupedMatmulParams,
    accumulation: Accumulation,
    residuals: Any,
    out_bar: jax.Array,
    accumulator: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of lhs and rhs; the latter is the accumulator if there is a chain."""
    lhs, rhs, group_sizes = residuals
    # Tensor cores multiply operands of one dtype, so a float32 cotangent is rounded to lhs's.
    out_bar = out_bar.astype(lhs.dtype)
    to_lhs = dataclasses.replace(
        params, transpose_rhs=not params.transpose_rhs, out_dtype=jnp.dtype(lhs.dtype)
    )
    lhs_bar = bind_matmul(out_bar, rhs, group_sizes, to_lhs)
    to_rhs = dataclasses.replace(params, out_dtype=jnp.dtype(accumulation.dtype(rhs)))
    return lhs_bar, bind_rhs_gradient(lhs, out_bar, group_sizes, to_rhs, accumulator)


def _forward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
    accumulation: Accumulation,
) -> Any:
    results = chained_matmul(lhs, rhs, group_sizes, accumulator, params, accumulation)
    return results, (lhs, rhs, group_sizes)


def _backward(
    params: GroupedMatmulParams, accumulation: Accumulation, residuals: Any, cotangents: Any
) -> Any:
    lhs_bar, rhs_bar = matmul_backward(params, accumulation, residuals, *cotangents)
    if accumulation is Accumulation.NONE:
        return lhs_bar, rhs_bar, None, None
    return lhs_bar, None, None, rhs_bar


chained_matmul.defvjp(_forward, _backward)
