"""A small mixture-of-experts transformer over bytes, in flax.nnx."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from text_data import VOCABULARY

from jax_ep import routing
from jax_ep.nnx import MoE, MoEStats


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes that determine the parameters' shapes."""

    width: int
    num_layers: int
    num_heads: int
    num_experts: int
    top_k: int
    intermediate_size: int


class Losses(NamedTuple):
    """The parts of the training loss, and the load of the experts.

    Attributes:
      cross_entropy: f32[], nats per byte.
      balancing: f32[], sum over layers; 1 per layer when every expert has the same load.
      z: f32[], sum over layers.
      expert_load: i32[layers, experts], assignments to each expert.
    """

    cross_entropy: jax.Array
    balancing: jax.Array
    z: jax.Array
    expert_load: jax.Array

    def total(self) -> jax.Array:
        """The loss that the optimizer minimizes."""
        return self.cross_entropy + 0.03 * self.balancing + 0.001 * self.z


class LanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out.

    `moe_layer` is the class of the expert layers: `MoE`, or `DenseMoE` to compare with.
    """

    def __init__(self, sizes: ModelSizes, *, moe_layer: Callable[..., MoE] = MoE, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, sizes.width, rngs=rngs)
        self.blocks = nnx.List(
            [Block(sizes, moe_layer=moe_layer, rngs=rngs) for _ in range(sizes.num_layers)]
        )
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(
            sizes.width, VOCABULARY, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MoEStats]:
        """int32[batch, length] -> float32[batch, length, 256], and the stats stacked by layer."""
        x = self.embedding(tokens)
        stats: list[MoEStats] = []
        for block in self.blocks:
            x, layer_stats = block(x)
            stats.append(layer_stats)
        return self.head(self.norm(x)), jax.tree.map(lambda *layers: jnp.stack(layers), *stats)

    def losses(self, windows: jax.Array) -> Losses:
        """Predicts every byte but a window's first, of int32[batch, length + 1]."""
        logits, stats = self(windows[:, :-1])
        log_probabilities = jax.nn.log_softmax(logits)
        targets = jax.nn.one_hot(windows[:, 1:], VOCABULARY)
        cross_entropy = -(log_probabilities * targets).sum(-1).mean()
        return Losses(cross_entropy, stats.aux_loss.sum(), stats.z_loss.sum(), stats.expert_load)


class Block(nnx.Module):
    """Attention, then experts, each added to the stream."""

    def __init__(self, sizes: ModelSizes, *, moe_layer: Callable[..., MoE], rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.attention = Attention(sizes.width, sizes.num_heads, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.moe = moe_layer(
            sizes.width, sizes.intermediate_size, sizes.num_experts, sizes.top_k, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEStats]:
        """[batch, length, width] to the same, and the expert layer's stats."""
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.inputs = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        heads = self.inputs(x).reshape(batch, length, 3, self.num_heads, -1)
        query, key, value = (heads[:, :, i] for i in range(3))
        y = jax.nn.dot_product_attention(rotary(query), rotary(key), value, is_causal=True)
        return self.output(y.reshape(batch, length, width))


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


class DenseMoE(MoE):
    """The same layer with the same parameters, by plain algebra: every expert on every token."""

    def __call__(
        self, x: jax.Array, *, token_mask: jax.Array | None = None, **_: Any
    ) -> tuple[jax.Array, MoEStats]:
        """As `MoE.__call__`, for x of three dimensions; nothing is quantized."""
        logits = x @ self.router_kernel[...]
        routed = routing.softmax_topk(logits, self.config.top_k, token_mask=token_mask)
        num_experts = logits.shape[-1]
        one_hot = jax.nn.one_hot(routed.topk_ids, num_experts)
        weights = (one_hot * routed.topk_weights[..., None]).sum(-2)
        gate, up = jnp.moveaxis(jnp.einsum("bth,ehcf->btecf", x, self.w_up[...]), -2, 0)
        activations = jax.nn.silu(gate) * up * weights[..., None]
        y = jnp.einsum("btef,efh->bth", activations, self.w_down[...])
        return y, MoEStats(
            aux_loss=routing.balancing_loss(routed.probabilities, routed.topk_ids),
            z_loss=routing.z_loss(logits, token_mask=token_mask),
            expert_load=routing.load(routed.topk_ids, num_experts),
            num_dropped=jnp.int32(0),
        )
