"""Floats of checkpoints in eight and four bits, computed on the host."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_ep._src.checkpoints.pieces import Array
from jax_ep._src.quant.formats import BLOCK

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of four bits, of which the highest is the sign."""


def from_blocks(values: Array, scales: Array) -> Array:
    """[N, K] in E4M3 with a scale per 128 x 128, the last of them partial, to bfloat16."""
    scales = scales.astype(np.float32)
    rows, columns = values.shape
    result = np.empty(values.shape, jnp.bfloat16)
    for i in range(0, rows, BLOCK):
        row = np.repeat(scales[i // BLOCK], BLOCK)[:columns]
        result[i : i + BLOCK] = values[i : i + BLOCK].astype(np.float32) * row
    return result


def from_mxfp4(blocks: Array, scales: Array) -> Array:
    """uint8 [N, K / 32, 16] with E8M0 bytes [N, K / 32] to bfloat16 [N, K], low nibbles first."""
    values = np.stack((E2M1[blocks & 15], E2M1[blocks >> 4]), -1).reshape(*scales.shape, 32)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return scaled.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)
