"""OLMoE-1B-7B (arXiv:2409.02060) in plain JAX, its layers scanned, around any layer of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import rotary

from jax_ep import routing

# Maps tokens [T, H], ids [T, K], weights [T, K], w_up [E, H, 2F] (gate first) and w_down [E, F, H]
# to [T, H].
Experts = Callable[..., jax.Array]

BALANCING, Z = 0.01, 0.001  # the paper's factors of the two losses
NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model, by default those of OLMoE-1B-7B: 6.9 billion parameters."""

    hidden: int = 2048
    num_layers: int = 16
    num_heads: int = 16
    num_experts: int = 64
    top_k: int = 8
    intermediate: int = 1024
    vocabulary: int = 50304


class Layers(NamedTuple):
    """The parameters of all N layers, stacked; or their shapes or shardings."""

    attention_norm: Any  # [N, H]
    query_norm: Any  # [N, H]
    key_norm: Any  # [N, H]
    qkv: Any  # [N, H, 3H]
    output: Any  # [N, H, H]
    moe_norm: Any  # [N, H]
    router: Any  # [N, H, E]
    w_up: Any  # [N, E, H, 2F], gate first
    w_down: Any  # [N, E, F, H]


class Params(NamedTuple):
    """All parameters, or their shapes or shardings."""

    embedding: Any  # [V, H]
    layers: Layers
    norm: Any  # [H]
    head: Any  # [H, V]


class Losses(NamedTuple):
    """The parts of the training loss, in nats per token; sums over layers for the latter two."""

    cross_entropy: jax.Array
    balancing: jax.Array
    z: jax.Array

    def total(self) -> jax.Array:
        """The loss that the optimizer minimizes."""
        return self.cross_entropy + BALANCING * self.balancing + Z * self.z


# ---- parameters


def shapes(sizes: Sizes) -> Params:
    """Returns the shape of every parameter."""
    n, h, e, f = sizes.num_layers, sizes.hidden, sizes.num_experts, sizes.intermediate
    layers = Layers(
        attention_norm=(n, h),
        query_norm=(n, h),
        key_norm=(n, h),
        qkv=(n, h, 3 * h),
        output=(n, h, h),
        moe_norm=(n, h),
        router=(n, h, e),
        w_up=(n, e, h, 2 * f),
        w_down=(n, e, f, h),
    )
    return Params((sizes.vocabulary, h), layers, (h,), (h, sizes.vocabulary))


def num_parameters(sizes: Sizes) -> int:
    """Returns how many numbers these are."""
    leaves = jax.tree.leaves(shapes(sizes), is_leaf=_is_shape)
    return sum(math.prod(shape) for shape in leaves)


def shardings(mesh: Mesh) -> Params:
    """Returns each parameter's sharding: experts are spread over the mesh, all else is on each."""
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "expert"))
    params = jax.tree.map(lambda _: replicated, shapes(Sizes()), is_leaf=_is_shape)
    return params._replace(layers=params.layers._replace(w_up=split, w_down=split))


def initialize(sizes: Sizes, mesh: Mesh, dtype: Any, seed: int) -> Params:
    """Draws the parameters on the devices, in their shards."""
    paths, structure = jax.tree_util.tree_flatten_with_path(shapes(sizes), is_leaf=_is_shape)

    def draw(key: jax.Array) -> Params:
        arrays = []
        for (path, shape), one in zip(paths, jax.random.split(key, len(paths)), strict=True):
            if "norm" in jax.tree_util.keystr(path):
                arrays.append(jnp.ones(shape, jnp.float32))  # bfloat16 is too coarse near 1
            else:
                arrays.append(jax.random.normal(one, shape, dtype) * jnp.asarray(0.02, dtype))
        return jax.tree.unflatten(structure, arrays)

    return jax.jit(draw, out_shardings=shardings(mesh))(jax.random.key(seed))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


# ---- computation


def losses(params: Params, windows: jax.Array, sizes: Sizes, experts: Experts) -> Losses:
    """Predicts every token but a window's first, of int32[batch, length + 1]."""
    # The gradient adds thousands of rows to one, if a token is frequent: in float32.
    embedding = params.embedding.astype(jnp.float32)
    x = embedding[windows[:, :-1]].astype(params.embedding.dtype)

    def body(x: jax.Array, layer: Layers) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x = x + attention(norm(x, layer.attention_norm), layer, sizes.num_heads)
        tokens = norm(x, layer.moe_norm)
        logits = jnp.dot(tokens, layer.router, preferred_element_type=jnp.float32)
        routed = routing.softmax_topk(logits, sizes.top_k, renormalize=False)
        flat = [a.reshape(-1, a.shape[-1]) for a in (tokens, *routed[:2])]
        y = experts(*flat, layer.w_up, layer.w_down).reshape(x.shape)
        balancing = routing.balancing_loss(routed.probabilities, routed.topk_ids)
        return x + y, (balancing, routing.z_loss(logits))

    x, (balancing, z) = jax.lax.scan(body, x, params.layers)
    logits = jnp.dot(norm(x, params.norm), params.head, preferred_element_type=jnp.float32)
    target = jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]
    cross_entropy = (jax.nn.logsumexp(logits, axis=-1) - target).mean()
    return Losses(cross_entropy, balancing.sum(), z.sum())


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square normalization, computed in float32."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + NORM_EPSILON) * scale).astype(x.dtype)


def attention(x: jax.Array, layer: Layers, num_heads: int) -> jax.Array:
    """Causal self-attention with normalized queries and keys, and rotary positions."""
    query, key, value = jnp.split(x @ layer.qkv, 3, axis=-1)
    query, key = norm(query, layer.query_norm), norm(key, layer.key_norm)
    heads = [a.reshape(*a.shape[:2], num_heads, -1) for a in (query, key, value)]
    query, key = (rotary(a).astype(x.dtype) for a in heads[:2])
    is_gpu = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
    y = jax.nn.dot_product_attention(
        query, key, heads[2], is_causal=True, implementation="cudnn" if is_gpu else "xla"
    )
    return y.reshape(x.shape) @ layer.output
