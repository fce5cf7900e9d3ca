"""Quantized arrays in float64, and the bound of matmuls of them."""

from __future__ import annotations

import testing  # isort: skip

import jax.numpy as jnp
import numpy as np
import tier

from jax_ep import quant

# Relative to the sum of magnitudes. Tensor cores add 32 products at a time, and cut off below about 2^-13 of the
# largest. With values of several magnitudes a model of that errs by up to 2^-10.7.
TENSOR_CORE_ERROR = 2**-10


def exact(x: quant.Quantized) -> np.ndarray:
    """Values times scales in float64, value by value of a block."""
    values, scales = np.asarray(x.values, np.float64), np.asarray(x.scales, np.float64)
    for axis, block in enumerate(x.block_shape):
        scales = np.repeat(scales, block, axis)
        scales = np.take(scales, range(values.shape[axis]), axis)
    return values * scales


def assert_products(out, exact, magnitudes, message, num_terms=300):
    """Products of quantized operands; on CPUs in float32, with the roundings of both dequantized operands."""
    if not tier.ON_GPU:
        return testing.assert_sums(out, exact, magnitudes, num_terms, message)
    out = np.asarray(out)
    unit = float(jnp.finfo(out.dtype).eps) / 2
    bound = TENSOR_CORE_ERROR * magnitudes + 1.01 * unit * np.abs(exact)
    error = np.abs(out.astype(np.float64) - exact)
    assert (error <= bound).all(), f"{message}: {np.max(error / np.maximum(bound, 1e-300))} bounds"
