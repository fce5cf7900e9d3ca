"""The layers of experts that are compared, each of one rank's arrays inside `jax.shard_map`.

x [T, H], ids [T, K], weights [T, K], w_up [L, H, 2F] (gate first) and w_down [L, F, H]. All drop
nothing on one rank; on several, a rank has room for `CAPACITY_FACTOR` times its even share.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from olmoe_model import Experts

import jax_ep
from jax_ep import quant

CAPACITY_FACTOR = 2.0

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Ours:
    """jax_ep's layer, by a recipe of eight bits if there is one."""

    quantization: quant.Recipe | None = None

    def __call__(self, x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        """Returns y [T, H]."""
        y, _ = jax_ep.moe_mlp(
            *(x, ids, weights, w_up, w_down),
            axis_name="expert",
            capacity_factor=CAPACITY_FACTOR,
            quantization=self.quantization,
        )
        return y


def plain(matmul: GroupedMatmul) -> Experts:
    """Gathers all tokens, sorts them by expert, and sums what the ranks computed."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        num_ranks = lax.axis_size("expert")
        num_local, (num_tokens, top_k) = w_up.shape[0], ids.shape
        num_rows = num_ranks * num_tokens * top_k
        if num_ranks > 1:
            num_rows = min(num_rows, math.ceil(CAPACITY_FACTOR * num_tokens * top_k))
            x, ids, weights = (lax.all_gather(a, "expert", tiled=True) for a in (x, ids, weights))
        local = ids.ravel() - lax.axis_index("expert") * num_local
        local = jnp.where((local >= 0) & (local < num_local), local, num_local)
        order = jnp.argsort(local, stable=True)[:num_rows]
        sizes = jnp.bincount(local[order], length=num_local + 1)[:-1].astype(jnp.int32)
        rows = x[order // top_k]
        if num_ranks > 1:
            # A matmul leaves rows past the last group unspecified, also in gradients. They may be
            # NaN, and NaN times zero is NaN.
            in_group = (jnp.arange(num_rows) < sizes.sum())[:, None]
            rows = jnp.where(in_group, rows, 0)
        gate, up = jnp.split(matmul(rows, w_up, sizes), 2, axis=-1)
        y = matmul(jax.nn.silu(gate) * up, w_down, sizes)
        if num_ranks == 1:
            by_token = y[jnp.argsort(order)].reshape(num_tokens, top_k, -1).astype(jnp.float32)
            return (by_token * weights[..., None]).sum(1).astype(x.dtype)
        y = jnp.where(in_group, y, 0).astype(jnp.float32)
        sums = jnp.zeros(x.shape, jnp.float32)
        sums = sums.at[order // top_k].add(y * weights.ravel()[order][:, None])
        return lax.psum_scatter(sums.astype(x.dtype), "expert", tiled=True)

    return layer


def tokamax() -> Experts:
    """The plain layer with tokamax's grouped matmul, by Triton."""
    ragged_dot = importlib.import_module("tokamax").ragged_dot
    return plain(lambda lhs, rhs, sizes: ragged_dot(lhs, rhs, sizes, implementation="triton"))


def nothing(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
    """No experts: what is left of the step's time is that of everything else."""
    return x


LAYERS: dict[str, Callable[[], Experts]] = {
    "jax_ep": Ours,
    "fp8": lambda: Ours(quant.Recipe()),
    "fp8_throughout": lambda: Ours(
        quant.Recipe(
            quantized_dispatch=True, quantized_cotangents=True, quantized_weight_gradients=True
        )
    ),
    "tokamax": tokamax,
    "ragged_dot": lambda: plain(lax.ragged_dot),
}


def sharded(layer: Experts, mesh: Mesh) -> Experts:
    """Maps a layer over the ranks; tokens and experts are split over them."""
    spec, check_vma = P("expert"), isinstance(layer, Ours)
    return jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
