"""Whole models of Hugging Face's checkpoints: attention in plain JAX around jax_ep's experts.

Mixtral, Qwen3-MoE, OLMoE and gpt-oss, by what config.json says. Experts are sharded over the axis
`expert`, and so are sequences; all other parameters are whole on every device.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.linen
from checkpoint_models.attention import attend, make_rope, write
from jax_ep import checkpoints, quant

FAMILIES = (
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

Arrays = dict[str, jax.Array]
Cache = list[tuple[jax.Array, jax.Array]]  # keys and values [S, C, heads, size] of each layer


class Params(NamedTuple):
    """The arrays of a model.

    Attributes:
      experts: the parameters of each layer with experts, by its index.
      quantized: experts that stay in eight or four bits, likewise.
      other: all others, by their names in the files.
    """

    experts: dict[int, Arrays]
    quantized: dict[int, Any]
    other: Arrays


class Adapters(NamedTuple):
    """Low-rank additions to the matrices, of which each is a pair (a, b) and adds a @ b.

    Attributes:
      experts: what the layers' `experts_fn` takes, by layer.
      attention: pairs ([in, rank], [rank, out]) by the names of the matrices in the files.
    """

    experts: dict[int, Any]
    attention: dict[str, tuple[jax.Array, jax.Array]]


class CheckpointModel:
    """The functions of a model over its `Params`. `options` go to the expert layers."""

    def __init__(self, config: dict[str, Any], mesh: Mesh, **options: Any):
        (name,) = config.get("architectures") or [None]
        if name not in FAMILIES:
            raise ValueError(
                f"the architecture {name!r} has no attention here; expected one of {FAMILIES}. "
                "jax_ep.checkpoints loads others for a model of your own."
            )
        self.config, self.mesh = config, mesh
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.rope = make_rope(config, self.head_size)
        self.moe = jax_ep.linen.MoE(**checkpoints.moe_options(config) | options, mesh=mesh)

    def window(self, i: int) -> int | None:
        """Returns how many positions a token of layer i sees, itself among them; None for all."""
        size: int | None = self.config.get("sliding_window")
        (name,) = self.config["architectures"]
        if not self.config.get("use_sliding_window", name != "Qwen3MoeForCausalLM"):
            return None
        kinds = self.config.get("layer_types")
        if kinds is None and name == "GptOssForCausalLM":
            kinds = ["sliding_attention", "full_attention"] * self.num_layers
        return size if kinds is None or kinds[i] == "sliding_attention" else None

    def make_cache(self, params: Params, batch_size: int, length: int) -> Cache:
        """Returns keys and values of no tokens, sharded by slots.

        They have the dtype of the embeddings: another would become that of all activations.
        """
        dtype = params.other["model.embed_tokens.weight"].dtype
        shape = (batch_size, length, self.num_kv_heads, self.head_size)
        sharding = NamedSharding(self.mesh, P("expert"))
        zeros = functools.partial(jnp.zeros, shape, dtype, device=sharding)
        return [(zeros(), zeros()) for _ in range(self.num_layers)]

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | None = None,
        adapters: Adapters | None = None,
    ) -> tuple[jax.Array, Cache, list[jax_ep.linen.MoEStats]]:
        """Runs all layers.

        Args:
          params: the parameters.
          tokens: int32[S, T], of S sequences.
          positions: int32[S, T], their positions, or -1 where there is no token: it is not routed.
          cache: of earlier tokens, to which these are written; without one these see each other.
          adapters: low-rank additions.

        Returns:
          [S, T, H] for `logits`, the cache, and the statistics of the layers with experts.
        """
        other = params.other
        x = other["model.embed_tokens.weight"][tokens]
        written: Cache = []
        all_stats: list[jax_ep.linen.MoEStats] = []
        attention = self._attention
        if cache is None:  # scores of all pairs are not kept for a backward pass
            attention = jax.checkpoint(attention, static_argnums=0)
        for i in range(self.num_layers):
            name = f"model.layers.{i}"
            normalized = self._norm(other, f"{name}.input_layernorm", x)
            entry = cache[i] if cache else None
            y, entry = attention(i, other, normalized, positions, entry, adapters)
            written.append(entry)
            x += y
            normalized = self._norm(other, f"{name}.post_attention_layernorm", x)
            if i in params.experts:
                result: Any = self.moe.apply(
                    checkpoints.linen_variables(params.experts[i]),
                    normalized,
                    token_mask=positions >= 0,
                    quantized_weights=params.quantized.get(i),
                    adapters=adapters and adapters.experts[i],
                )
                y, stats = result
                all_stats.append(stats)
            else:
                y = self._dense(other, f"{name}.mlp", normalized)
            x += y
        return self._norm(other, "model.norm", x), written, all_stats

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns float32[..., vocabulary]."""
        tied = self.config.get("tie_word_embeddings", False)
        head = params.other["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return jnp.einsum("...h,vh->...v", x, head, preferred_element_type=jnp.float32)

    def _attention(
        self,
        i: int,
        other: Arrays,
        x: jax.Array,
        positions: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None,
        adapters: Adapters | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        name = f"model.layers.{i}.self_attn"
        pairs = adapters.attention if adapters else {}
        query, key, value = (linear(other, f"{name}.{p}", x, pairs) for p in PROJECTIONS[:3])
        query, key = (
            self._normalized_heads(other, f"{name}.{n}_norm", a)
            for n, a in (("q", query), ("k", key))
        )
        value = self._heads(value)
        if (limit := self.config.get("clip_qkv")) is not None:
            query, key, value = (jnp.clip(a, -limit, limit) for a in (query, key, value))
        query, key = self.rope(query, positions), self.rope(key, positions)
        key_positions = positions
        if cache is not None:
            key, value = write(cache[0], key, positions), write(cache[1], value, positions)
            key_positions = jnp.arange(key.shape[1])[None]
        distance = positions[:, :, None] - key_positions[:, None]
        sees = (distance >= 0) & (key_positions >= 0)[:, None]
        if (window := self.window(i)) is not None:
            sees &= distance < window
        y = attend(query, key, value, sees, other.get(f"{name}.sinks"))
        return linear(other, f"{name}.o_proj", y, pairs), (key, value)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_size)

    def _normalized_heads(self, other: Arrays, name: str, x: jax.Array) -> jax.Array:
        """Splits into heads, before or after a norm, as its size says."""
        scale = other.get(f"{name}.weight")
        if scale is None:
            return self._heads(x)
        if scale.size == self.head_size:
            return self._norm(other, name, self._heads(x))
        return self._heads(self._norm(other, name, x))

    def _norm(self, other: Arrays, name: str, x: jax.Array) -> jax.Array:
        """Root-mean-square normalization, computed in float32."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(square + self.config["rms_norm_eps"])
        return (wide * other[f"{name}.weight"]).astype(x.dtype)

    def _dense(self, other: Arrays, name: str, x: jax.Array) -> jax.Array:
        gate, up = (linear(other, f"{name}.{n}_proj", x) for n in ("gate", "up"))
        return linear(other, f"{name}.down_proj", jax.nn.silu(gate) * up)


def load(
    folder: pathlib.Path, mesh: Mesh, **options: Any
) -> tuple[CheckpointModel, Params, checkpoints.Checkpoint]:
    """Loads a folder, of which `options` go to the expert layers."""
    loaded = checkpoints.load(folder, mesh=mesh)
    model = CheckpointModel(loaded.config, mesh, **options)
    return model, Params(loaded.layers, loaded.quantized, dequantized(loaded.other)), loaded


def dequantized(other: Arrays) -> Arrays:
    """Returns matrices in blocks of 128 x 128 as bfloat16, and all others as they are."""
    suffix = "_scale_inv"
    multiply = jax.jit(quant.dequantize)
    blocks = {
        name: quant.Quantized(other[name], scales, quant.Fp8Block128())
        for name in other
        if (scales := other.get(f"{name}{suffix}")) is not None
    }
    return {
        name: multiply(blocks[name]) if name in blocks else array
        for name, array in other.items()
        if not name.endswith(suffix)
    }


def make_mesh(num_devices: int | None = None) -> Mesh:
    """Returns the mesh of so many devices, by default of all. On CPUs it makes them."""
    if num_devices and "xla_force_host_platform_device_count" not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        jax.config.update("jax_num_cpu_devices", num_devices)  # GPUs do not mind
    count = num_devices or jax.device_count()
    if count > jax.device_count():
        raise SystemExit(
            f"--expert-parallel {count} needs as many devices; here are {jax.device_count()}."
        )
    return jax_ep.make_mesh((count,), ("expert",), axis_types=(AxisType.Auto,))


def linear(
    other: Arrays,
    name: str,
    x: jax.Array,
    adapters: dict[str, tuple[jax.Array, jax.Array]] | None = None,
) -> jax.Array:
    """Multiplies by a matrix [out, in], and adds what there is of a bias and an adapter."""
    y = x @ other[f"{name}.weight"].T
    if (bias := other.get(f"{name}.bias")) is not None:
        y += bias
    if adapters and name in adapters:
        a, b = adapters[name]
        y += (x @ a @ b).astype(y.dtype)
    return y
