"""Checkpoints of Hugging Face's transformers, and the layers that they are of.

`moe_options` says how to build `jax_ep.nnx.MoE` or `jax_ep.linen.MoE` from a config.json, `load`
reads the files onto a mesh, and `save` writes them back. The families are those of Mixtral,
Qwen2-MoE, Qwen3-MoE and Qwen3-Next, OLMoE, DeepSeek-V2 and -V3, Kimi-K2, GLM-4.5, gpt-oss, Llama-4
and MiniMax-M2. `from_maxtext` and `to_maxtext` convert the expert blocks of MaxText.
"""

from __future__ import annotations

from jax_ep._src.checkpoints.checkpoint import Checkpoint, Params, linen_variables
from jax_ep._src.checkpoints.load import OtherSpecs, load
from jax_ep._src.checkpoints.maxtext import GateBias, from_maxtext, to_maxtext
from jax_ep._src.checkpoints.options import moe_options
from jax_ep._src.checkpoints.save import save

__all__ = [
    "Checkpoint",
    "GateBias",
    "OtherSpecs",
    "Params",
    "from_maxtext",
    "linen_variables",
    "load",
    "moe_options",
    "save",
    "to_maxtext",
]
