"""A small checkpoint over bytes with random parameters, to try programs with."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jax_ep.linen
from jax_ep import checkpoints

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def write_small(folder: pathlib.Path) -> pathlib.Path:
    """Writes a Qwen3-MoE, which transformers can read, into a new folder, and returns that."""
    width, size = CONFIG["hidden_size"], CONFIG["head_dim"]
    queries, keys = (size * CONFIG[f"num_{n}_heads"] for n in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (CONFIG["vocab_size"], width),
        "model.norm": (width,),
        "lm_head": (CONFIG["vocab_size"], width),
    }
    of_layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
    }
    indices = tuple(range(CONFIG["num_hidden_layers"]))
    for i in indices:
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    keys_of = iter(jax.random.split(jax.random.key(0), len(shapes) + len(indices)))
    other = {}
    for name, shape in shapes.items():
        scale = 1.0 if name == "model.embed_tokens" else width**-0.5
        draw = jax.random.normal(next(keys_of), shape) * scale
        other[f"{name}.weight"] = draw if len(shape) > 1 else jnp.ones(shape)
    moe = jax_ep.linen.MoE(**checkpoints.moe_options(CONFIG), expert_axis=None)
    x = jnp.ones((1, width))
    made = checkpoints.Checkpoint(
        config=CONFIG,
        layers={i: nn.unbox(moe.init(next(keys_of), x)["params"]) for i in indices},
        quantized={},
        other=other,
        ignored=(),
        layer_indices=indices,
        is_stacked=False,
        bytes_read=0,
        folder=folder,
        file_dtypes={},
    )
    checkpoints.save(folder, made)
    return folder
