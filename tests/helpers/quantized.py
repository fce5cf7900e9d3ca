"""Quantizing as loops in numpy, quantized arrays in float64, and the bound of matmuls of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import testing  # isort: skip

import jax.numpy as jnp
import numpy as np
import tier

from jax_ep import quant

# Relative to the sum of magnitudes. Tensor cores add 32 products at a time, and cut off below about 2^-13 of the
# largest. With values of several magnitudes a model of that errs by up to 2^-10.7.
TENSOR_CORE_ERROR = 2**-10
EIGHT_BITS = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
LARGEST = EIGHT_BITS | {jnp.dtype(jnp.float4_e2m1fn): 6.0}


@dataclasses.dataclass(frozen=True)
class Mxfp8(quant.Format):
    """E4M3 values with a scale in E8M0 per 32 of a row: a format that the library does not know."""

    scale_rounding: Any = "power_of_two"
    min_amax: float = 1e-30
    dtype: ClassVar[Any] = jnp.dtype(jnp.float8_e4m3fn)
    scale_dtype: ClassVar[Any] = jnp.dtype(jnp.float8_e8m0fnu)
    block: ClassVar[int] = 32


@dataclasses.dataclass(frozen=True)
class Fp8Block32(Mxfp8):
    """E4M3 values with a float32 scale per 32 of a row, which no kernel moves."""

    scale_dtype: ClassVar[Any] = jnp.dtype(jnp.float32)


def norm(result, expected) -> float:
    """The relative norm of the difference."""
    result, expected = (np.asarray(a, np.float64) for a in (result, expected))
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)


def is_blocked(format):
    return format.is_blocked


def numpy_scale(block, format):
    """The scale of all values of a block."""
    amax = np.abs(block).max()
    scale = max(amax, np.float32(format.min_amax)) * np.float32(1 / LARGEST[format.dtype])
    if format.scale_rounding == "power_of_two":
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return np.float32(scale)


def numpy_quantize(x, format, blocks, ulps=0):
    """Matrix by matrix, block by block; `blocks` are sizes along the last two axes.

    Factors, which are 1 / scale, are `ulps` units in the last place too large.
    """
    x = np.asarray(x)
    values = np.zeros(x.shape, format.dtype)
    counts = [-(-size // block) for size, block in zip(x.shape[-2:], blocks, strict=True)]
    scales = np.zeros((*x.shape[:-2], *counts), np.float32)
    for *matrix, i, j in itertools.product(*map(range, scales.shape)):
        rows = slice(i * blocks[0], (i + 1) * blocks[0])
        columns = slice(j * blocks[1], (j + 1) * blocks[1])
        block = x[*matrix, rows, columns].astype(np.float32)
        scale = scales[*matrix, i, j] = numpy_scale(block, format)
        factor = np.float32(1) / scale
        values[*matrix, rows, columns] = (block * with_ulps(factor, ulps)).astype(format.dtype)
    return values, scales


def with_ulps(factor, ulps):
    """The float32 that is so many units in the last place away."""
    return (factor.view(np.int32) + np.int32(ulps)).view(np.float32)


def values_of(shape, dtype=np.float32, seed=0):
    """Normal values whose rows have magnitudes from 2^-20 to 2^19."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-20, 20, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * 2.0**exponents).astype(dtype)


def assert_quantized(got, expected, message=""):
    values, scales = expected
    testing.assert_bitwise(got.scales, scales, f"{message} scales")
    testing.assert_bitwise(got.values, values, f"{message} values")


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
