"""Eight-bit formats: how values are quantized, and arrays of quantized values with their scales.

A quantized value stands for ``value * scale``. Everything here is pure JAX and works under `jit`,
`vmap` and `shard_map`. Quantizing has no derivative; `fake_quantize` has a straight-through one.
"""

from __future__ import annotations

from jax_ep._src.fake_quantize import fake_quantize
from jax_ep._src.quantize import dequantize, quantize, quantize_weights
from jax_ep._src.quantized import Format, Fp8Block128, Fp8Row, Quantized
from jax_ep._src.quantized_experts import quantize_experts
from jax_ep._src.recipe import QuantizedWeights, Recipe, quantize_for_training

__all__ = [
    "Format",
    "Fp8Block128",
    "Fp8Row",
    "Quantized",
    "QuantizedWeights",
    "Recipe",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_experts",
    "quantize_for_training",
    "quantize_weights",
]
