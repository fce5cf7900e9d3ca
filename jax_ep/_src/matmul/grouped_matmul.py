"""grouped_matmul: one matmul for each group of consecutive rows."""

from __future__ import annotations

from typing import Any

import jax

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.accumulation import Accumulation
from jax_ep._src.matmul.grouped_matmul_quantized import grouped_matmul_quantized
from jax_ep._src.matmul.grouped_matmul_recipe import grouped_matmul_by_recipe
from jax_ep._src.matmul.layer_stack import (
    LayerIndex,
    check_index,
    check_no_layer,
    flatten,
    sizes_in_stack,
)
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import chained_matmul
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedWeights, Recipe, check_no_quantized_weights


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

    Accumulators are float32. It is not a collective, so it works inside and outside `shard_map`.

    Three experts, of which the second has no rows::

        lhs, rhs = jnp.ones((8, 16)), jnp.ones((3, 16, 32))
        out = jax_ep.grouped_matmul(lhs, rhs, jnp.array([3, 0, 5]))  # [8, 32]

    Args:
      lhs: [M, K] bfloat16, float16 or float32.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; in lhs's dtype, or float32 (master
        weights). A float32 rhs is rounded to lhs's dtype, and its float32 gradient comes straight
        from the accumulators. Both lhs and rhs may be `jax_ep.quant.Quantized` instead, of either
        format; the call then has no derivative.
      group_sizes: integer[G], on the device; group g is the next group_sizes[g] rows. Negative
        sizes count as 0, and rows past M are ignored.
      transpose_rhs: whether rhs is [G, N, K]; nothing is copied.
      preferred_element_type: dtype of the result, lhs's dtype or float32; None is lhs's dtype. With
        quantized operands it is bfloat16 or float32, and None is bfloat16.
      layer: an int, or an integer scalar on the device such as the index of a scan. rhs is then a
        stack [layers, G, K, N], of which this layer is read in place. The gradient is that of the
        stack, with zeros for other layers.
      zero_tail: whether the rows past the last group are zeros, in the result and in the gradient
        of lhs. False leaves them unspecified. The tails of lhs and of cotangents are never read.
      quantization: a `jax_ep.quant.Recipe`, by which the call and its derivative quantize lhs, rhs
        and the cotangent. It needs lhs in bfloat16 or float32.
      quantized_rhs: rhs after `jax_ep.quant.quantize_for_training` by the same recipe; rhs itself
        is then not read, and only gets the gradient. None quantizes rhs in every call, and in its
        derivative.
      num_sms: the most SMs that the call uses on CUDA; None chooses. GPUs of compute capability 9.0
        use them in pairs, so odd numbers are rounded down, and 1 is rounded up.
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
        return grouped_matmul_by_recipe(lhs, rhs, group_sizes, quantized_rhs, quantization, params)
    lhs, rhs, group_sizes = compat.vary_together((lhs, rhs, group_sizes))
    with jax.named_scope("jax_ep.grouped_matmul"):
        return chained_matmul(lhs, rhs, group_sizes, None, params, Accumulation.NONE)[0]
