"""The operands of one mixture-of-experts block on all devices: tokens, routes and weights."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.bench import transfer_problem
from jax_ep.bench.programs import AXIS
from jax_ep.bench.transfer_problem import Routes, choose_experts

MAX_SETS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Holds the sizes of one rank: its tokens, and the experts of one of four ranks."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise argparse.ArgumentTypeError(
                f"top-k {self.top_k} of {self.experts} experts; expected at most as many as "
                "experts, since those of a token are distinct"
            )

    @property
    def rows(self) -> int:
        """T * K, which a rank receives on average."""
        return self.tokens * self.top_k

    @property
    def expert_elements(self) -> int:
        """The size of an expert's gate, up and down matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def model(self) -> str:
        """The name of the model with these experts, or their sizes."""
        sizes = dataclasses.astuple(self)[1:]
        names = [name for name, other in MODELS.items() if other == sizes]
        return names[0] if names else ", ".join(map(str, sizes))

    def __str__(self) -> str:
        return f"{self.model}, T={self.tokens}"


# Hidden size, intermediate size, experts of one rank of four, top-k.
MODELS: dict[str, tuple[int, int, int, int]] = {
    "deepseek-v3": (7168, 2048, 64, 8),
    "qwen3-30b": (2048, 768, 32, 8),
    "qwen3-235b": (4096, 1536, 32, 8),
    "mixtral": (4096, 14336, 2, 2),
    "gpt-oss": (2880, 2880, 32, 4),
}


class Operands(NamedTuple):
    """The operands of all ranks one after another, split over them."""

    x: jax.Array  # [R * T, H] bfloat16
    out_bar: jax.Array  # [R * T, H] bfloat16, the cotangent of the result
    topk_ids: jax.Array  # int32[R * T, K]
    topk_weights: jax.Array  # float32[R * T, K], positive, with a sum of 1
    w_up: jax.Array  # [R * L, H, 2F], gate first
    w_down: jax.Array  # [R * L, F, H]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sets of operands for calls in turn. All have the same routes and weights.

    The weights of every model are larger than the L2 cache, so one set of them is enough. `cache`
    is for what others make of the operands.
    """

    mesh: Mesh
    shape: Shape
    weight_dtype: Any
    routes: Routes
    sets: list[Operands]
    cache: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def active_experts(self) -> int:
        """The experts with rows on the rank that has most of them."""
        num_local = self.shape.experts
        active = np.unique(self.routes.topk_ids)
        return int(np.bincount(active // num_local, minlength=self.mesh.size).max())

    @property
    def facts(self) -> dict[str, Any]:
        """Values for the record of a case."""
        return {
            "num_ranks": self.mesh.size,
            "recv_capacity": self.routes.recv_capacity,
            "active_experts": self.active_experts,
            "sets": len(self.sets),
        }


def make_problem(mesh: Mesh, shape: Shape, weight_dtype: Any, rotated_bytes: float) -> Problem:
    """Makes random operands; tokens go to uniformly drawn, distinct experts of all ranks."""
    num_experts = shape.experts * mesh.size
    routed = transfer_problem.Shape(shape.tokens, shape.hidden, num_experts, shape.top_k)
    ids = choose_experts(routed, mesh.size, "balanced")
    weights = np.random.default_rng(1).random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(-1, keepdims=True)
    split = NamedSharding(mesh, P(AXIS))

    @functools.partial(jax.jit, static_argnums=(1, 2, 3), out_shardings=split)
    def normal(seed: jax.Array, sizes: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
        drawn = jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16)
        return (drawn * jnp.bfloat16(fan_in**-0.5)).astype(dtype)

    size, hidden = shape.intermediate, shape.hidden
    up = normal(1, (num_experts, hidden, 2 * size), hidden, weight_dtype)
    down = normal(2, (num_experts, size, hidden), size, weight_dtype)
    topk_ids, topk_weights = (
        jax.device_put(a.reshape(-1, shape.top_k), split) for a in (ids, weights)
    )
    number = math.ceil(rotated_bytes / (2 * shape.tokens * hidden))
    tokens = (mesh.size * shape.tokens, hidden)
    sets = []
    for seed in range(min(max(2, number), MAX_SETS)):
        x, out_bar = (normal(s, tokens, 1, jnp.bfloat16) for s in (10 + seed, 20 + seed))
        sets.append(Operands(x, out_bar, topk_ids, topk_weights, up, down))
    routes = Routes(ids, num_experts)
    return Problem(mesh, shape, weight_dtype, routes, jax.block_until_ready(sets))
