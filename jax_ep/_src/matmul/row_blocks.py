"""Row blocks: the rows of all groups, cut into blocks of up to 128 that never span two groups."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._src.core.loops import divide
from jax_ep._src.matmul.reference import group_ends
from jax_ep._src.quant.formats import BLOCK


class RowBlocks(NamedTuple):
    """As many blocks as groups of any sizes need; those past the last group have no rows."""

    first_rows: jax.Array  # int32[B]
    num_rows: jax.Array  # int32[B]
    group_sizes: jax.Array  # int32[G]: the groups' rows, rounded up to whole blocks


def most_row_blocks(num_groups: int, num_rows: int) -> int:
    """Returns B: every group with rows may have one partial block."""
    partial = min(num_groups, num_rows)
    return (num_rows - partial) // BLOCK + partial


def row_blocks(group_sizes: jax.Array, num_rows: int) -> RowBlocks:
    """Returns the row blocks of groups, whose sizes are read as the matmuls read them."""
    ends = group_ends(group_sizes, num_rows)
    sizes = jnp.diff(ends, prepend=0)
    blocks_of = divide(sizes + (BLOCK - 1), BLOCK)
    last_blocks = jnp.cumsum(blocks_of, dtype=jnp.int32)
    block = jnp.arange(most_row_blocks(group_sizes.shape[0], num_rows), dtype=jnp.int32)
    group = (last_blocks <= block[:, None]).sum(1)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    first_rows = (ends - sizes)[group] + (block - (last_blocks - blocks_of)[group]) * BLOCK
    rows = jnp.clip(ends[group] - first_rows, 0, BLOCK)
    int32 = (array.astype(jnp.int32) for array in (first_rows, rows, blocks_of * BLOCK))
    return RowBlocks(*int32)
