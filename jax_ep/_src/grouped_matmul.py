"""grouped_matmul: one matmul for each group of consecutive rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._src import compat, primitive, runtime
from jax_ep._src.compat import Aval
from jax_ep._src.errors import DtypeError
from jax_ep._src.reference import matmul as reference_matmul

CAST_ROWS = 64
"""Average rows of a group above which a float32 matrix is cast before the product."""


@dataclasses.dataclass(frozen=True)
class MatmulParams:
    """The static parameters of the primitives, hashed by value."""

    transpose_rhs: bool
    out_dtype: Any
    zero_tail: bool
    num_sms: int
    implementation: str | None


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    zero_tail: bool = True,
    num_sms: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each group of rows of `lhs` by its own matrix, as `jax.lax.ragged_dot` does.

    Sums are float32. It is not a collective: it works inside and outside `shard_map`.

    Args:
      lhs: [M, K] bfloat16, float16 or float32.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; of lhs's dtype, or float32 (master
        weights): it is then rounded to lhs's dtype, and its gradient is float32 straight from the
        sums.
      group_sizes: int32[G], on the device; group g is the next group_sizes[g] rows. Negative sizes
        count as 0, and rows past M are ignored.
      transpose_rhs: whether rhs is [G, N, K]; nothing is copied.
      preferred_element_type: dtype of the result, lhs's dtype or float32; None is lhs's dtype.
      zero_tail: whether the result's rows past the last group are zeros, also in the gradient of
        lhs. False leaves them unspecified. The tails of lhs and of cotangents are never read.
      num_sms: the most streaming multiprocessors to use on CUDA; None chooses. Those of compute
        capability 9.0 work in pairs: odd numbers are rounded down, 1 up.
      implementation: ``"cuda"``, ``"xla"``, or None to choose by platform, dtype and shapes.

    Returns:
      [M, N].

    Raises:
      ArgumentError (a ValueError): shapes that do not fit, or an operand sharded over an Explicit
        mesh axis.
      DtypeError (a TypeError): a dtype not listed above.
      UnavailableError (a NotImplementedError): ``implementation="cuda"`` where it cannot run.
    """
    _check_operands(lhs, rhs, group_sizes, transpose_rhs)
    params = MatmulParams(
        transpose_rhs=transpose_rhs,
        out_dtype=_out_dtype(lhs, preferred_element_type),
        zero_tail=zero_tail,
        num_sms=primitive.check_num_sms("grouped_matmul", num_sms),
        implementation=runtime.resolve_implementation("grouped_matmul", implementation),
    )
    lhs, rhs, group_sizes = compat.vary_together((lhs, rhs, group_sizes))
    with jax.named_scope("jax_ep.grouped_matmul"):
        return _grouped_matmul(lhs, rhs, group_sizes, params)


# ---- checks


def _check_operands(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, transpose_rhs: bool
) -> None:
    operation = "grouped_matmul"
    primitive.check_shape(operation, "lhs", lhs.shape, ("rows", "K"))
    primitive.check_group_sizes(operation, group_sizes)
    contracted = lhs.shape[1]
    expected = ("N", contracted) if transpose_rhs else (contracted, "N")
    primitive.check_shape(operation, "rhs", rhs.shape, (group_sizes.shape[0], *expected))
    primitive.check_row_dtype(operation, "lhs", lhs.dtype)
    primitive.check_matrix_dtype(operation, "rhs", rhs, "lhs", lhs)


def _out_dtype(lhs: jax.Array, preferred_element_type: Any) -> np.dtype[Any]:
    out_dtype = jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
    if out_dtype not in (lhs.dtype, jnp.float32):
        raise DtypeError(
            f"jax_ep.grouped_matmul: preferred_element_type={out_dtype} with lhs in {lhs.dtype}; "
            f"expected {lhs.dtype} or float32. Cast the result instead."
        )
    return out_dtype


# ---- abstract evaluation


def _grouped_matmul_avals(
    lhs: Aval, rhs: Aval, group_sizes: Aval, *, params: MatmulParams
) -> list[Aval]:
    num_columns = rhs.shape[1 if params.transpose_rhs else 2]
    return [compat.aval_like(lhs, (lhs.shape[0], num_columns), params.out_dtype)]


def _rhs_gradient_avals(
    lhs: Aval, out_bar: Aval, group_sizes: Aval, *, params: MatmulParams
) -> list[Aval]:
    matrix = (lhs.shape[1], out_bar.shape[1])
    shape = (group_sizes.shape[0], *(matrix[::-1] if params.transpose_rhs else matrix))
    return [compat.aval_like(lhs, shape, params.out_dtype)]


# ---- lowering


def _attributes(avals: list[Aval], params: MatmulParams) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "zero_tail": np.bool_(params.zero_tail),
        "num_sms": np.int64(params.num_sms),
    }


def _rhs_gradient_attributes(avals: list[Aval], params: MatmulParams) -> dict[str, Any]:
    return {
        "transpose_rhs": np.bool_(params.transpose_rhs),
        "num_sms": np.int64(params.num_sms),
    }


def _unsupported(avals: list[Aval], params: MatmulParams) -> str | None:
    left, right, groups = (aval.shape for aval in avals)
    return primitive.too_many(
        num_rows=left[0], num_groups=groups[0], matrix_size=max(left[1], *right[1:])
    )


grouped_matmul_p = primitive.define_primitive(
    "grouped_matmul",
    abstract_eval=_grouped_matmul_avals,
    reference=reference_matmul.grouped_matmul,
    attributes=_attributes,
    unsupported=_unsupported,
)

grouped_matmul_rhs_gradient_p = primitive.define_primitive(
    "grouped_matmul_rhs_gradient",
    abstract_eval=_rhs_gradient_avals,
    reference=reference_matmul.grouped_matmul_rhs_gradient,
    attributes=_rhs_gradient_attributes,
    unsupported=_unsupported,
)


# ---- binding, for the derivatives here and of others


def bind_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, params: MatmulParams
) -> jax.Array:
    """The primitive, with rhs as its kernel reads it best."""
    (out,) = grouped_matmul_p.bind(lhs, kernel_rhs(lhs, rhs), group_sizes, params=params)
    return out


def bind_rhs_gradient(
    lhs: jax.Array, out_bar: jax.Array, group_sizes: jax.Array, params: MatmulParams
) -> jax.Array:
    """The primitive."""
    (rhs_bar,) = grouped_matmul_rhs_gradient_p.bind(lhs, out_bar, group_sizes, params=params)
    return rhs_bar


def kernel_rhs(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A float32 rhs in lhs's dtype, where that is faster; the values are those of the primitive.

    With many rows a group, the kernel that reads operands of 16 bits only makes up for the cast.
    With few, the time goes into reading the matrices, and a cast would read them once more.
    """
    return rhs.astype(lhs.dtype) if lhs.shape[0] > CAST_ROWS * rhs.shape[0] else rhs


def rows_in_groups(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Which rows are in a group, as the primitives count them: bool[M]."""
    total = jnp.clip(group_sizes, 0, num_rows).sum()
    return jnp.arange(num_rows) < total


# ---- derivative: two grouped matmuls over the same groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, params: MatmulParams
) -> jax.Array:
    return bind_matmul(lhs, rhs, group_sizes, params)


def _grouped_matmul_forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, params: MatmulParams
) -> Any:
    return _grouped_matmul(lhs, rhs, group_sizes, params), (lhs, rhs, group_sizes)


def _grouped_matmul_backward(params: MatmulParams, residuals: Any, out_bar: jax.Array) -> Any:
    lhs, rhs, group_sizes = residuals
    # Matrix units multiply operands of one dtype, so a float32 cotangent is rounded to lhs's.
    out_bar = out_bar.astype(lhs.dtype)
    to_lhs = dataclasses.replace(
        params, transpose_rhs=not params.transpose_rhs, out_dtype=jnp.dtype(lhs.dtype)
    )
    lhs_bar = bind_matmul(out_bar, rhs, group_sizes, to_lhs)
    to_rhs = dataclasses.replace(params, out_dtype=jnp.dtype(rhs.dtype))
    return lhs_bar, bind_rhs_gradient(lhs, out_bar, group_sizes, to_rhs), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)
