"""The operands of one mixture-of-experts block on all devices: tokens, routes and weights."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.bench.common.programs import AXIS, sharded
from jax_ep.bench.transfer import problem as transfer_problem
from jax_ep.bench.transfer.problem import Routes, choose_experts

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

    The weights of every model are larger than the L2 cache, so one set of them is enough.

    Attributes:
      backward: whether a backward pass is measured, too.
    """

    mesh: Mesh
    shape: Shape
    weight_dtype: Any
    routes: Routes
    sets: list[Operands]
    backward: bool = True
    _made: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what the first caller's `make` returned. One thread at a time computes."""
        with self._lock:
            if name not in self._made:
                self._made[name] = jax.block_until_ready(make())
            return self._made[name]

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


def make_problem(
    mesh: Mesh, shape: Shape, weight_dtype: Any, rotated_bytes: float, *, backward: bool = True
) -> Problem:
    """Makes random operands; tokens go to uniformly drawn, distinct experts of all ranks."""
    num_experts = shape.experts * mesh.size
    routed = transfer_problem.Shape(shape.tokens, shape.hidden, num_experts, shape.top_k)
    ids = choose_experts(routed, mesh.size, "balanced")
    weights = np.random.default_rng(1).random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(-1, keepdims=True)
    split = NamedSharding(mesh, P(AXIS))
    topk_ids, topk_weights = (
        jax.device_put(a.reshape(-1, shape.top_k), split) for a in (ids, weights)
    )
    number = math.ceil(rotated_bytes / (2 * shape.tokens * shape.hidden))
    number = min(max(2, number), MAX_SETS)
    draw = functools.partial(_draw, shape, weight_dtype, number)
    ranks = jax.device_put(np.arange(mesh.size), split)
    tokens, up, down = jax.jit(sharded(draw, mesh))(ranks)
    sets = [Operands(x, out_bar, topk_ids, topk_weights, up, down) for x, out_bar in tokens]
    routes = Routes(ids, num_experts)
    return Problem(mesh, shape, weight_dtype, routes, jax.block_until_ready(sets), backward)


def _draw(shape: Shape, weight_dtype: Any, number: int, rank: jax.Array) -> Any:
    """Returns one rank's x and out_bar of every set, w_up and w_down: normal, by fan-in."""
    # This generator compiles in a fraction of the default one's time.
    key = jax.random.fold_in(jax.random.key(0, impl="rbg"), rank[0])
    keys = iter(jax.random.split(key, 2 * number + 2))

    def normal(sizes: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
        drawn = jax.random.normal(next(keys), sizes, jnp.bfloat16)
        return (drawn * jnp.bfloat16(fan_in**-0.5)).astype(dtype)

    size, hidden, experts = shape.intermediate, shape.hidden, shape.experts
    tokens = [
        tuple(normal((shape.tokens, hidden), 1, jnp.bfloat16) for _ in range(2))
        for _ in range(number)
    ]
    up = normal((experts, hidden, 2 * size), hidden, weight_dtype)
    return tokens, up, normal((experts, size, hidden), size, weight_dtype)
