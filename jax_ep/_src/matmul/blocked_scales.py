"""blocked_scales: scales in the layout that the tensor cores of Blackwell read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._src.core.errors import ArgumentError
from jax_ep._src.matmul.row_blocks import row_blocks

ROWS, COLUMNS = 128, 4
"""Of a block of scales, which has 512 bytes."""

INTERLEAVED_ROWS = 32


def blocked_scales(scales: jax.Array, group_sizes: jax.Array | None = None) -> jax.Array:
    """Lays scales of one byte out as cuBLAS and CUTLASS read them on Blackwell GPUs.

    A block has the scales of 128 rows and of four neighbors along a row, which are 128 values in
    MXFP8 and MXFP4 and 64 in NVFP4. Inside a block rows r, r + 32, r + 64 and r + 96 are
    neighbors. Missing rows and columns are zeros. With group sizes each group begins at a block
    of its own, as grouped matmuls read rows; weights, [G, N, ceil(K / 32)], need none. The layout
    is that of cuBLAS's documentation, "1D block scaling factors layout". Plain JAX computes it.

    For example::

        rows = quant.quantize(jnp.ones((300, 256)), quant.MxFp8())  # scales [300, 8]
        scales = quant.blocked_scales(rows.scales, jnp.array([200, 100]))  # [5, 2, 32, 16]

    Args:
      scales: float8_e8m0fnu, float8_e4m3fn or uint8[..., M, S]: `Quantized.scales`.
      group_sizes: int32[G], the rows of each group; None: M rows that belong together.

    Returns:
      scales' dtype[..., ceil(M / 128), ceil(S / 4), 32, 16], or [ceil(M / 128) + G, ...] with
      group sizes: that many blocks hold any groups, and those after the last group are zeros.
      Group g begins at block ``sum(ceil(group_sizes[:g] / 128))``.

    Raises:
      ArgumentError: scales do not have one byte or two dimensions, or group sizes do not fit.
    """
    if scales.ndim < 2 or scales.dtype.itemsize != 1:
        raise ArgumentError(
            f"jax_ep.quant.blocked_scales: scales are {scales.dtype.name}{list(scales.shape)}; "
            "expected float8_e8m0fnu or float8_e4m3fn [..., M, S], the scales of MxFp8, MxFp4 or "
            "NvFp4."
        )
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    bits = _padded(bits, -scales.shape[-2] % ROWS, -scales.shape[-1] % COLUMNS)
    if group_sizes is not None:
        bits = _aligned_groups(bits, scales, group_sizes)
    blocks = bits.reshape(
        *bits.shape[:-2],
        bits.shape[-2] // ROWS,
        ROWS // INTERLEAVED_ROWS,
        INTERLEAVED_ROWS,
        bits.shape[-1] // COLUMNS,
        COLUMNS,
    )
    first = bits.ndim - 2  # the axes: blocks of rows, parts, rows, blocks of columns, columns
    leading = tuple(range(first))
    blocks = blocks.transpose(*leading, first, first + 3, first + 2, first + 1, first + 4)
    blocks = blocks.reshape(*blocks.shape[:-2], COLUMNS * ROWS // INTERLEAVED_ROWS)
    return lax.bitcast_convert_type(blocks, scales.dtype)


def _padded(bits: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(bits, [(0, 0)] * (bits.ndim - 2) + [(0, rows), (0, columns)])


def _aligned_groups(bits: jax.Array, scales: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Moves the rows of each group to a multiple of 128; rows of no group are zeros."""
    if (
        scales.ndim != 2
        or group_sizes.ndim != 1
        or not jnp.issubdtype(group_sizes.dtype, jnp.integer)
    ):
        raise ArgumentError(
            f"jax_ep.quant.blocked_scales: scales are {scales.dtype.name}{list(scales.shape)} and "
            f"group_sizes {group_sizes.dtype.name}{list(group_sizes.shape)}; expected scales "
            "[M, S] and int32[G], the rows of each group."
        )
    blocks = row_blocks(group_sizes, scales.shape[0])
    row_in_block = jnp.arange(ROWS)
    source = jnp.where(
        row_in_block < blocks.num_rows[:, None],
        blocks.first_rows[:, None] + row_in_block,
        bits.shape[0],  # fills with zeros
    )
    rows = jnp.take(bits, source.reshape(-1), axis=0, mode="fill", fill_value=0)
    return _padded(rows, bits.shape[0] + group_sizes.shape[0] * ROWS - rows.shape[0], 0)
