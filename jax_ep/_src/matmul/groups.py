"""Groups of consecutive rows: which rows are in one, and which are the tail behind them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.transfer import weighted


def mask_tail(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Replaces the rows past the last group by zeros, in values and in cotangents.

    Use it for code between `dispatch(..., zero_tail=False)` and `combine` that would read the tail.

    For example::

        rows = jax_ep.mask_tail(jnp.ones((8, 16)), jnp.array([3, 2]))  # rows 5 to 7 are zeros

    Args:
      rows: [M, ...].
      group_sizes: integer[L], as in `grouped_matmul`.

    Returns:
      [M, ...] in rows' dtype.
    """
    checks.array("mask_tail", "rows", rows)
    group_sizes = checks.group_sizes("mask_tail", group_sizes)
    in_groups = rows_in_groups(group_sizes, rows.shape[0])
    masked = jnp.where(in_groups.reshape(-1, *(1,) * (rows.ndim - 1)), rows, 0)
    if weighted.is_marked(rows):
        weighted.mark(masked)
    return masked


def rows_in_groups(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Which rows are in a group, as the primitives count them: bool[M]."""
    total = jnp.clip(group_sizes, 0, num_rows).sum()
    return jnp.arange(num_rows) < total
