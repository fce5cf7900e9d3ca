"""A grouped matmul like lax.ragged_dot, whose rows past the last group are NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _in_groups(rows, sizes, otherwise):
    return jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), rows, otherwise)


@jax.custom_vjp
def ragged_dot(lhs, rhs, sizes):
    """It does not read those rows either: only the results, and the gradients of lhs, have NaN."""
    return _forward(lhs, rhs, sizes)[0]


def _forward(lhs, rhs, sizes):
    lhs = _in_groups(lhs, sizes, 0)
    return _in_groups(jax.lax.ragged_dot(lhs, rhs, sizes), sizes, jnp.nan), (lhs, rhs, sizes)


def _backward(residuals, out_bar):
    lhs, rhs, sizes = residuals
    _, backward = jax.vjp(lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, sizes), lhs, rhs)
    lhs_bar, rhs_bar = backward(_in_groups(out_bar, sizes, 0))
    return _in_groups(lhs_bar, sizes, jnp.nan), rhs_bar, None


ragged_dot.defvjp(_forward, _backward)
