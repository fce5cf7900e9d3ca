"""LoRA (arXiv:2106.09685) on the experts and the attention of a checkpoint's model."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from checkpoint_models.model import PROJECTIONS, Adapters, CheckpointModel, Params
from jax_ep.checkpoints import Checkpoint

Pair = tuple[jax.Array, jax.Array]


def experts(
    rows: jax.Array, group_sizes: jax.Array, w_up: Any, w_down: Any, adapters: dict[str, Pair]
) -> jax.Array:
    """Computes experts with SwiGLU: an `experts_fn`."""

    def multiply(x: jax.Array, w: jax.Array, pair: Pair) -> jax.Array:
        def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax_ep.grouped_matmul(x, w.astype(x.dtype), group_sizes)

        return matmul(x, w) + matmul(matmul(x, pair[0]), pair[1])

    h = multiply(rows, w_up.reshape(*w_up.shape[:2], -1), adapters["up"])
    gate, up = jnp.split(h, 2, -1)
    return multiply(jax.nn.silu(gate) * up, w_down, adapters["down"])


def make_adapters(model: CheckpointModel, params: Params, rank: int, seed: int) -> Adapters:
    """Returns float32 pairs that add nothing yet; those of experts are sharded as these are."""
    if model.moe.use_bias or params.quantized:
        raise ValueError(
            "the experts of this checkpoint have biases or eight bits; expected those of Mixtral, "
            "Qwen3-MoE or OLMoE in floats, which checkpoint_models/lora.py computes."
        )
    root, numbers = jax.random.key(seed), itertools.count()
    count, width, size = (
        getattr(model.moe, name) for name in ("num_experts", "hidden_size", "intermediate_size")
    )

    def pair(*lead: int, inputs: int, outputs: int) -> Pair:
        key = jax.random.fold_in(root, next(numbers))
        a = jax.random.normal(key, (*lead, inputs, rank)) * inputs**-0.5
        return a, jnp.zeros((*lead, rank, outputs))

    def place(tree: Any, spec: P) -> Any:
        return jax.device_put(tree, NamedSharding(model.mesh, spec))

    of_experts = {
        i: {
            "up": pair(count, inputs=width, outputs=2 * size),
            "down": pair(count, inputs=size, outputs=width),
        }
        for i in params.experts
    }
    names = [
        f"model.layers.{i}.self_attn.{p}" for i in range(model.num_layers) for p in PROJECTIONS
    ]
    shapes = {name: params.other[f"{name}.weight"].shape for name in names}
    attention = {name: pair(inputs=i, outputs=o) for name, (o, i) in shapes.items()}
    divides = count % model.mesh.size == 0  # otherwise the layer pads them
    return Adapters(place(of_experts, P("expert") if divides else P()), place(attention, P()))


def merge(loaded: Checkpoint, adapters: Adapters) -> Checkpoint:
    """Returns the checkpoint with the adapters added to its matrices, in their dtypes."""
    layers = dict(loaded.layers)
    for i, pairs in adapters.experts.items():
        added = {f"w_{name}": _product(pair) for name, pair in pairs.items()}
        layers[i] = layers[i] | {name: _add(layers[i][name], more) for name, more in added.items()}
    other = dict(loaded.other)
    for name, pair in adapters.attention.items():
        full = f"{name}.weight"
        other[full] = _add(other[full], _product(pair).T)
    return dataclasses.replace(loaded, layers=layers, other=other)


@jax.jit
def _product(pair: Pair) -> jax.Array:
    return jnp.matmul(*pair, precision="highest")


@jax.jit
def _add(matrix: jax.Array, more: jax.Array) -> jax.Array:
    """Adds to a matrix, whose experts may be followed by rows of padding."""
    if matrix.ndim > 2:
        more = jnp.pad(more, [(0, len(matrix) - len(more)), (0, 0), (0, 0)])
    return (matrix + more.reshape(matrix.shape)).astype(matrix.dtype)
