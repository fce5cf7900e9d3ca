"""Formats of eight and four bits: how values are quantized, and arrays of them with scales.

A quantized value stands for ``value * scale``. Everything here works under `jit`, `vmap` and
`shard_map`. Quantizing has no derivative, but `fake_quantize` has a straight-through one.
"""

from __future__ import annotations

from jax_ep._src.matmul.blocked_scales import blocked_scales
from jax_ep._src.mlp.quantized_experts import experts_from_checkpoint, quantize_experts
from jax_ep._src.quant.fake_quantize import fake_quantize
from jax_ep._src.quant.formats import Format, Fp8Block128, Fp8Row
from jax_ep._src.quant.microscaling import MxFp4, MxFp8
from jax_ep._src.quant.nvfp4 import NvFp4
from jax_ep._src.quant.quantize import dequantize, quantize
from jax_ep._src.quant.quantize_for_training import quantize_for_training
from jax_ep._src.quant.quantize_weights import quantize_weights
from jax_ep._src.quant.quantized import Quantized
from jax_ep._src.quant.recipe import QuantizedWeights, Recipe, WeightsOnly

__all__ = [
    "Format",
    "Fp8Block128",
    "Fp8Row",
    "MxFp4",
    "MxFp8",
    "NvFp4",
    "Quantized",
    "QuantizedWeights",
    "Recipe",
    "WeightsOnly",
    "blocked_scales",
    "dequantize",
    "experts_from_checkpoint",
    "fake_quantize",
    "quantize",
    "quantize_experts",
    "quantize_for_training",
    "quantize_weights",
]
