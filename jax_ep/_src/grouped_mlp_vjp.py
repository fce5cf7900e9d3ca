"""Two grouped matmuls with a named activation between them, and their derivative.

Its two halves stand by themselves, because `moe_mlp` gets the rows of its backward pass in another
way than by keeping them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src import compat
from jax_ep._src.grouped_matmul import MatmulParams, bind_matmul, bind_rhs_gradient, rows_in_groups
from jax_ep._src.grouped_matmul_activation import (
    FusedParams,
    bind_activation,
    bind_activation_gradient,
)

BIAS_COLUMNS = 8
"""Columns of the narrow matmuls that sum for biases: the least whose rows are 16 bytes."""


class Experts(NamedTuple):
    """The parameters of the experts of one rank; L of them, H hidden, F expert hidden."""

    w_up: jax.Array  # [L, H, N], N = 2F (gate, up) for a gated activation, otherwise F
    w_down: jax.Array  # [L, F, H]
    b_up: jax.Array | None  # float32[L, N]
    b_down: jax.Array | None  # float32[L, H]


@dataclasses.dataclass(frozen=True)
class MlpOptions:
    """What is static, hashed by value."""

    activation: str  # its name; "none" if a function runs between the matmuls
    zero_tail: bool  # of the gradient of the rows
    num_sms: int
    implementation: str | None

    def fused(self, activation: str) -> FusedParams:
        """Parameters of a matmul with an epilogue."""
        return FusedParams(activation, self.num_sms, self.implementation)

    def plain(
        self, out_dtype: Any, *, transpose_rhs: bool = False, zero_tail: bool = False
    ) -> MatmulParams:
        """Parameters of a matmul without."""
        return MatmulParams(
            transpose_rhs=transpose_rhs,
            out_dtype=jnp.dtype(out_dtype),
            zero_tail=zero_tail,
            num_sms=self.num_sms,
            implementation=self.implementation,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fused_mlp(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    options: MlpOptions,
) -> jax.Array:
    """[M, H] in rows' dtype; its tail is unspecified."""
    return fused_mlp_forward(rows, experts, group_sizes, row_weights, options, keep=False)[0]


def fused_mlp_forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    options: MlpOptions,
    *,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The result, and the pre-activation if it is to be kept."""
    w_up, w_down, b_up, b_down = experts
    activation = options.fused(options.activation)
    hidden, pre_activation = bind_activation(
        rows, w_up, group_sizes, b_up, None, activation, keep_pre_activation=keep
    )
    if b_down is None and row_weights is None:
        y = bind_matmul(hidden, w_down, group_sizes, options.plain(rows.dtype))
    else:
        none = options.fused("none")
        y, _ = bind_activation(hidden, w_down, group_sizes, b_down, row_weights, none)
    return y, pre_activation


def fused_mlp_backward(
    options: MlpOptions, residuals: Any, y_bar: jax.Array
) -> tuple[jax.Array, Experts, jax.Array | None]:
    """Gradients of rows, experts and row weights; from these, group sizes and pre-activation."""
    rows, (w_up, w_down, b_up, b_down), group_sizes, row_weights, pre_activation = residuals
    pre_activation_bar, hidden, row_dots = bind_activation_gradient(
        y_bar, w_down, group_sizes, pre_activation, row_weights, options.fused(options.activation)
    )
    to_rows = options.plain(rows.dtype, transpose_rhs=True, zero_tail=options.zero_tail)
    rows_bar = bind_matmul(pre_activation_bar, w_up, group_sizes, to_rows)
    # Sums are float32; gradients of float32 weights are not rounded on their way.
    w_up_bar = bind_rhs_gradient(rows, pre_activation_bar, group_sizes, options.plain(w_up.dtype))
    w_down_bar = bind_rhs_gradient(hidden, y_bar, group_sizes, options.plain(w_down.dtype))
    b_up_bar = b_down_bar = row_weights_bar = None
    if b_up is not None:
        b_up_bar = _sum_of_groups(None, pre_activation_bar, group_sizes, options)
    if b_down is not None:
        b_down_bar = _sum_of_groups(row_weights, y_bar, group_sizes, options)
    if row_weights is not None:
        row_weights_bar = row_dots.sum(1)
        if b_down is not None:
            row_weights_bar += _dots_with_group(y_bar, b_down, group_sizes, options)
        in_groups = rows_in_groups(group_sizes, rows.shape[0])
        row_weights_bar = jnp.where(in_groups, row_weights_bar, 0)
    return rows_bar, Experts(w_up_bar, w_down_bar, b_up_bar, b_down_bar), row_weights_bar


def _forward(
    rows: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    row_weights: jax.Array | None,
    options: MlpOptions,
) -> Any:
    y, pre_activation = fused_mlp_forward(
        rows, experts, group_sizes, row_weights, options, keep=True
    )
    return y, (rows, experts, group_sizes, row_weights, pre_activation)


def _backward(options: MlpOptions, residuals: Any, y_bar: jax.Array) -> Any:
    rows_bar, experts_bar, row_weights_bar = fused_mlp_backward(options, residuals, y_bar)
    return rows_bar, experts_bar, None, row_weights_bar


fused_mlp.defvjp(_forward, _backward)


# ---- gradients that have to do with biases: narrow matmuls, whose sums have a fixed order


def _sum_of_groups(
    row_weights: jax.Array | None, rows: jax.Array, group_sizes: jax.Array, options: MlpOptions
) -> jax.Array:
    """The weighted sum of each group's rows [M, N], float32[L, N]."""
    if row_weights is None:
        parts = [jnp.ones(rows.shape[0], rows.dtype)]
    else:
        parts = _split(row_weights, rows.dtype)
    lhs, rows = compat.vary_together((_narrow(parts), rows))
    rows = rows.astype(lhs.dtype)
    sums = bind_rhs_gradient(lhs, rows, group_sizes, options.plain(jnp.float32))
    return sums[:, : len(parts)].sum(1)


def _dots_with_group(
    rows: jax.Array, vectors: jax.Array, group_sizes: jax.Array, options: MlpOptions
) -> jax.Array:
    """The product of each row [M, H] with its group's float32 vector [L, H], float32[M]."""
    parts = _split(vectors, rows.dtype)
    rhs = _narrow(parts)
    lhs = rows.astype(rhs.dtype)
    params = options.plain(jnp.float32, transpose_rhs=True)
    return bind_matmul(lhs, rhs, group_sizes, params)[:, : len(parts)].sum(1)


def _narrow(parts: list[jax.Array]) -> jax.Array:
    """[n, ...] each -> [n, BIAS_COLUMNS, ...], the last ones zeros."""
    missing = [jnp.zeros_like(parts[0])] * (BIAS_COLUMNS - len(parts))
    return jnp.stack([*parts, *missing], axis=1)


def _split(values: jax.Array, dtype: Any) -> list[jax.Array]:
    """float32 values as exact sums of what can be multiplied by `dtype` without a loss.

    Three bfloat16 numbers hold the 24 bits of a float32. Not three of float16: the last ones of
    usual values are below its range. There float32 it is, and the other operand is cast, too.
    """
    if dtype != jnp.bfloat16:
        return [values]
    parts = []
    for _ in range(3):
        # Not a cast there and back, which XLA may remove.
        part = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        values = values - part
    return parts
