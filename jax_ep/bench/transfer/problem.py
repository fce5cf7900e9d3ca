"""The operands of a transfer on all devices, and in numpy where its tokens go."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench.common.programs import AXIS, sharded
from jax_ep.bench.matmul.benchmark import probabilities

ROUTINGS = ("balanced", "zipf")
MAX_SETS = 16  # few tokens do not fill the L2 in any bearable number of sets


@dataclasses.dataclass(frozen=True)
class Shape:
    """[tokens, hidden] on every rank, each token for `top_k` of all `experts`."""

    tokens: int
    hidden: int
    experts: int
    top_k: int

    @property
    def row_bytes(self) -> int:
        """The size of a token in bfloat16."""
        return 2 * self.hidden

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise argparse.ArgumentTypeError(
                f"{self} has top-k {self.top_k} of {self.experts} experts; expected at most as "
                "many as experts, since those of a token are distinct"
            )

    def __str__(self) -> str:
        return f"{self.tokens}, {self.hidden}, {self.experts}, {self.top_k}"


# ---- routes


def choose_experts(shape: Shape, num_ranks: int, routing: str) -> np.ndarray:
    """Returns int32[R, T, K], distinct experts for every token, the same in every run.

    `routing` is "balanced" (uniform) or "zipf" (see `matmul.probabilities`), alike for all tokens.
    """
    random = np.random.default_rng(0)
    logits = np.log(probabilities(shape.experts, routing, random))
    ids = np.empty((num_ranks, shape.tokens, shape.top_k), np.int32)
    for rank in range(num_ranks):  # not all at once, for memory
        # The largest of logits plus Gumbel noise are drawn without replacement.
        noisy = logits + random.gumbel(size=(shape.tokens, shape.experts))
        ids[rank] = np.argsort(-noisy, axis=1)[:, : shape.top_k]
    return ids


@dataclasses.dataclass(frozen=True)
class Routes:
    """The assignments of all ranks; an assignment's index is (rank * T + token) * K + k.

    Attributes:
      topk_ids: int32[R, T, K], the experts.
      num_experts: E; expert e lives on rank e // (E / R).
    """

    topk_ids: np.ndarray
    num_experts: int

    @property
    def destinations(self) -> np.ndarray:
        """int32[R, T, K], the rank of each assignment's expert."""
        return self.topk_ids // (self.num_experts // len(self.topk_ids))

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """int64[R, R], the rows that a rank (first) sends to another (second)."""
        num_ranks = len(self.topk_ids)
        return np.stack([np.bincount(d.ravel(), minlength=num_ranks) for d in self.destinations])

    @property
    def recv_capacity(self) -> int:
        """The most rows that any rank receives: with it nothing is dropped."""
        return max(1, int(self.counts.sum(0).max()))

    @property
    def busiest_pairs(self) -> int:
        """Distinct (token, other rank) pairs of the rank with most of them, out or in."""
        is_sent = self.destinations[..., None] == np.arange(len(self.topk_ids))
        pairs = is_sent.any(2).sum(1)
        np.fill_diagonal(pairs, 0)
        return int(max(pairs.sum(0).max(), pairs.sum(1).max()))

    def sent_tokens(self) -> np.ndarray:
        """Returns int32[R, T * K], the token of every row that a rank sends, by expert."""
        by_expert = np.argsort(self.topk_ids.reshape(len(self.topk_ids), -1), 1, kind="stable")
        return (by_expert // self.topk_ids.shape[2]).astype(np.int32)


# ---- operands


class Operands(NamedTuple):
    """The operands of dispatch, of all ranks one after another, split over them."""

    x: jax.Array  # [R * T, H] bfloat16
    topk_ids: jax.Array  # int32[R * T, K]
    topk_weights: jax.Array  # float32[R * T, K], positive, with a sum of 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """The operands of a case: sets of them for calls in turn, with the same routes."""

    mesh: Mesh
    shape: Shape
    routes: Routes
    sets: list[Operands]

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.mesh.size

    @property
    def remote_bytes(self) -> int:
        """De-duplicated bytes that leave or reach the busiest rank."""
        return self.routes.busiest_pairs * self.shape.row_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """Values for the report."""
        return {
            "remote_bytes": self.remote_bytes,
            "recv_capacity": self.routes.recv_capacity,
            "sets": len(self.sets),
        }

    def split(self, array: np.ndarray) -> jax.Array:
        """Returns [R, n, ...] as [R * n, ...] on the devices, array[r] on rank r."""
        flat = array.reshape(-1, *array.shape[2:])
        return jax.device_put(flat, NamedSharding(self.mesh, P(AXIS)))

    def take(self, tokens: np.ndarray) -> list[jax.Array]:
        """Returns for every set [R * n, H]: the tokens int[R, n] of each rank."""
        index = self.split(tokens)
        take = jax.jit(sharded(lambda x, index: x[index], self.mesh))
        return jax.block_until_ready([take(operands.x, index) for operands in self.sets])

    def fill(self, num_rows: int) -> list[jax.Array]:
        """Returns for every set [R * num_rows, H]: the tokens of each rank again and again."""
        tokens = np.arange(num_rows) % self.shape.tokens
        return self.take(np.broadcast_to(tokens, (self.num_ranks, num_rows)))


def make_mesh(num_devices: int) -> Mesh:
    """Makes a mesh of the first devices."""
    auto = (AxisType.Auto,)
    return jax_ep.make_mesh((num_devices,), (AXIS,), axis_types=auto, expert_axis=AXIS)


def make_problem(mesh: Mesh, shape: Shape, routing: str, rotated_bytes: float) -> Problem:
    """Makes 2 to 16 sets of random operands, so that a rank's tokens span `rotated_bytes`."""
    ids = choose_experts(shape, mesh.size, routing)
    weights = np.random.default_rng(1).random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(-1, keepdims=True)
    number = math.ceil(rotated_bytes / (shape.tokens * shape.row_bytes))
    problem = Problem(mesh, shape, Routes(ids, shape.experts), [])
    x_shape = (mesh.size * shape.tokens, shape.hidden)
    normal = jax.jit(
        functools.partial(jax.random.normal, shape=x_shape, dtype=jnp.bfloat16),
        out_shardings=NamedSharding(mesh, P(AXIS)),
    )
    topk_ids, topk_weights = problem.split(ids), problem.split(weights)
    for seed in range(min(max(2, number), MAX_SETS)):
        x = jax.block_until_ready(normal(jax.random.key(seed)))
        problem.sets.append(Operands(x, topk_ids, topk_weights))
    return problem
