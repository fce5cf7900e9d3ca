"""grouped_matmul_rhs_gradient: the gradient of grouped_matmul's matrices, which may accumulate."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks, compat
from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.layer_stack import LayerIndex, check_index, sizes_in_stack
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.matmul.primitives import bind_matmul, bind_rhs_gradient


def grouped_matmul_rhs_gradient(
    lhs: jax.Array,
    out_gradient: jax.Array,
    group_sizes: jax.Array,
    *,
    accumulator: jax.Array | None = None,
    layer: LayerIndex | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the gradient of `grouped_matmul` for its rhs, and can add it to an accumulator.

    Group g gets ``lhs[rows of g].T @ out_gradient[rows of g]``, summed in float32. It is not a
    collective, so it works inside and outside `shard_map`.

    Added to a float32 sum of earlier gradients, in its memory under `jax.jit`::

        lhs, out_bar, sums = jnp.ones((8, 16)), jnp.ones((8, 32)), jnp.zeros((3, 16, 32))
        group_sizes = jnp.array([3, 0, 5])
        sums = jax_ep.grouped_matmul_rhs_gradient(lhs, out_bar, group_sizes, accumulator=sums)

    Args:
      lhs: [M, K] bfloat16, float16 or float32.
      out_gradient: [M, N] in lhs's dtype, or float32, which is rounded to lhs's dtype.
      group_sizes: integer[G], as in `grouped_matmul`. The tails of lhs and out_gradient are never
        read.
      accumulator: None, or float32[G, K, N] ([G, N, K] with `transpose_rhs`), to which the gradient
        is added in float32. A group without rows keeps its matrix bit by bit. The result takes the
        accumulator's memory: under jit it is updated in place if it is not used afterwards and, as
        an argument, is donated (``donate_argnums``). Otherwise XLA copies it before the call.
      layer: an int, or an integer scalar on the device. The accumulator then holds the matrices of
        all layers, float32[layers * G, K, N], and the gradient is added to those of this layer.
      transpose_rhs: whether the result is [G, N, K].
      preferred_element_type: dtype of the result, lhs's dtype or float32. None is lhs's dtype, or
        with an accumulator float32, which is then the only one allowed.
      num_sms: the most SMs that the call uses on CUDA, as in `grouped_matmul`.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [G, K, N], or [G, N, K] with `transpose_rhs`. Without an accumulator, groups without rows get
      zeros.

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, or an operand sharded over an Explicit
        mesh axis.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    operation = "grouped_matmul_rhs_gradient"
    checks.rows(operation, "lhs", lhs, ("rows", "K"))
    checks.shape(operation, "out_gradient", out_gradient, (lhs.shape[0], "N"))
    checks.matrix_dtype(operation, "out_gradient", out_gradient, "lhs", lhs)
    group_sizes = checks.group_sizes(operation, group_sizes)
    if layer is not None and accumulator is None:
        raise ArgumentError(
            f"jax_ep.{operation}: layer is given without an accumulator; expected the gradients of "
            "all layers, to which this layer's is added. Give accumulator=, or leave layer out."
        )
    if accumulator is not None:
        matrix = (lhs.shape[1], out_gradient.shape[1])
        matrix = matrix[::-1] if transpose_rhs else matrix
        if layer is not None:
            checks.shape(operation, "accumulator", accumulator, ("layers * groups", *matrix))
            num_layers = accumulator.shape[0] // group_sizes.shape[0]
            index = check_index(operation, layer, num_layers)
            group_sizes = sizes_in_stack(group_sizes, num_layers, index)
        shape = (group_sizes.shape[0], *matrix)
        checks.accumulator(operation, accumulator, shape, preferred_element_type)
        preferred_element_type = jnp.float32
    params = GroupedMatmulParams(
        transpose_rhs=transpose_rhs,
        out_dtype=checks.out_dtype(operation, lhs, preferred_element_type),
        zero_tail=True,
        num_sms=checks.num_sms(operation, num_sms),
        implementation=checks.implementation(operation, implementation),
    )
    lhs, out_gradient, group_sizes, accumulator = compat.vary_together(
        (lhs, out_gradient.astype(lhs.dtype), group_sizes, accumulator)
    )
    with jax.named_scope("jax_ep.grouped_matmul_rhs_gradient"):
        return _rhs_gradient(lhs, out_gradient, group_sizes, accumulator, params)


# ---- derivative: two grouped matmuls over the same groups; the accumulator's is the identity


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rhs_gradient(
    lhs: jax.Array,
    out_gradient: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
) -> jax.Array:
    return bind_rhs_gradient(lhs, out_gradient, group_sizes, params, accumulator)


def _forward(
    lhs: jax.Array,
    out_gradient: jax.Array,
    group_sizes: jax.Array,
    accumulator: jax.Array | None,
    params: GroupedMatmulParams,
) -> Any:
    result = _rhs_gradient(lhs, out_gradient, group_sizes, accumulator, params)
    has_accumulator = None if accumulator is None else ()
    return result, (lhs, out_gradient, group_sizes, has_accumulator)


def _backward(params: GroupedMatmulParams, residuals: Any, result_bar: jax.Array) -> Any:
    lhs, out_gradient, group_sizes, has_accumulator = residuals
    to_rows = dataclasses.replace(params, out_dtype=jnp.dtype(lhs.dtype))
    # As rhs, the cotangent takes rows of lhs to rows of out_gradient.
    to_lhs = dataclasses.replace(to_rows, transpose_rhs=not params.transpose_rhs)
    lhs_bar = bind_matmul(out_gradient, result_bar, group_sizes, to_lhs)
    out_gradient_bar = bind_matmul(lhs, result_bar, group_sizes, to_rows)
    accumulator_bar = None if has_accumulator is None else result_bar
    return lhs_bar, out_gradient_bar, None, accumulator_bar


_rhs_gradient.defvjp(_forward, _backward)
