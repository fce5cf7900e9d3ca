"""NVFP4, the format of four bits that NVIDIA's libraries and checkpoints have."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_ep._src.quant.formats import LEAST_SCALE, Format


@dataclasses.dataclass(frozen=True)
class NvFp4(Format):
    """NVFP4: E2M1 values with a scale in E4M3 per 16 of a row, and a float32 scale per tensor.

    A value stands for value * (scale * `Quantized.tensor_scale`). The tensor's scale is its largest
    magnitude times 1 / (448 * 6), unless it is given; the scale of 16 values is their largest
    magnitude times 1 / (6 * the tensor's scale), rounded to nearest even and at least 2^-9, so that
    no scale is zero. The largest values of a block saturate if its scale is rounded down. Packing
    is as in `MxFp4`. Kernels send rows of this format and do nothing else with it yet: the other
    operations run in pure JAX, with a warning on GPUs. Recipes do not take it.

    For example::

        x = jnp.linspace(-3, 3, 4 * 64).reshape(4, 64)
        rows = quant.quantize(x, quant.NvFp4(), tensor_scale=3 / (448 * 6))
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return jnp.dtype(jnp.float4_e2m1fn)

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """E4M3, whose sign is not used."""
        return jnp.dtype(jnp.float8_e4m3fn)

    @property
    def scale_rounding(self) -> Literal["none"]:
        """Scales are not powers of two."""
        return "none"

    @property
    def block(self) -> int:
        """How many values of a row share a scale."""
        return 16

    @property
    def has_tensor_scale(self) -> bool:
        """True: a float32 scale of the whole tensor multiplies those of blocks."""
        return True

    @property
    def min_amax(self) -> float:
        """The least one: scales times the tensor's scale are at least 2^-125."""
        return self.least_amax

    @property
    def least_amax(self) -> float:
        """The lower bound of the magnitude from which a tensor's scale is computed."""
        least_scale = float(jnp.finfo(self.scale_dtype).smallest_subnormal)
        largest = float(jnp.finfo(self.dtype).max) * float(jnp.finfo(self.scale_dtype).max)
        return LEAST_SCALE / least_scale * largest

    def for_weights(self) -> Format:
        """Returns the format of the weights, which is this one."""
        return self

    def with_min_amax(self, min_amax: float) -> Format:
        """Returns this format: magnitudes have no floor but that of the tensor's scale."""
        return self
