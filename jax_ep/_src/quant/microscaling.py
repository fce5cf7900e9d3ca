"""MXFP8 and MXFP4, formats of the Open Compute Project's microscaling (MX) specification."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_ep._src.quant.formats import Format, eight_bit_dtype


@dataclasses.dataclass(frozen=True)
class _Microscaling(Format):
    """32 values of a row share a scale in E8M0, whatever the values are."""

    @property
    def scale_rounding(self) -> Literal["power_of_two"]:
        """Scales are powers of two, rounded up so that no value saturates."""
        return "power_of_two"

    @property
    def min_amax(self) -> float:
        """The least one: scales are at least 2^-125."""
        return self.least_amax

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """E8M0, an exponent in a byte."""
        return jnp.dtype(jnp.float8_e8m0fnu)

    @property
    def block(self) -> int:
        """How many values of a row share a scale."""
        return 32

    def for_weights(self) -> Format:
        """Returns the format of the weights, which is this one."""
        return self

    def with_min_amax(self, min_amax: float) -> Format:
        """Returns this format: magnitudes have no floor but that of E8M0."""
        return self


@dataclasses.dataclass(frozen=True)
class MxFp8(_Microscaling):
    """MXFP8: E4M3 or E5M2 values with a scale in E8M0 per 32 values of a row.

    A scale is the smallest power of two by which no value of its block saturates, which is how
    NVIDIA's libraries and qwix choose it. The specification (Open Compute Project, "OCP
    Microscaling Formats (MX)", version 1.0) rounds down instead. Kernels send rows of this format
    and do nothing else with it yet: the other operations run in pure JAX, with a warning on GPUs.

    For example::

        rows = quant.quantize(x, quant.MxFp8())

    Attributes:
      dtype: float8_e4m3fn (values up to 448) or float8_e5m2 (up to 57344).
    """

    dtype: Any = jnp.float8_e4m3fn

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", eight_bit_dtype(self.dtype))

    def for_weights(self) -> Format:
        """Returns the format of the weights: E4M3, whatever the rows' dtype."""
        return MxFp8()


@dataclasses.dataclass(frozen=True)
class MxFp4(_Microscaling):
    """MXFP4: E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6) with a scale in E8M0 per 32 of a row.

    This is the format of gpt-oss's experts. Values are an array of float4_e2m1fn;
    `Quantized.packed` and `Quantized.from_packed` have two in a byte, as files do. Scales are as in
    `MxFp8`. Kernels send rows of this format, and multiply bfloat16 rows by weights in it
    (`WeightsOnly`); the other operations run in pure JAX, with a warning on GPUs.

    For example::

        two_in_a_byte = quant.quantize(x, quant.MxFp4()).packed()
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return jnp.dtype(jnp.float4_e2m1fn)
