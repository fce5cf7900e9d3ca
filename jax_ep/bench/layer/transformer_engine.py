"""A layer of TransformerEngine's parts for JAX: its permutation and its grouped matmul."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench.common.benchmark import Case, Started
from jax_ep.bench.layer import baselines
from jax_ep.bench.layer.passes import start_layer
from jax_ep.bench.layer.problem import Problem, Shape

PACKAGE = "transformer_engine"


class TransformerEngine:
    """On one GPU. Its whole layer for several includes the router, so it cannot be given routes."""

    name = "TransformerEngine"
    operations: tuple[str, ...] = ("forward", "both")

    def applies(self, shape: Shape, weights: str, num_ranks: int) -> bool:
        """To all."""
        return True

    def start(self, case: Case, problem: Problem) -> Started:
        """Compiles the layer, or raises the reason why it cannot run."""
        permutation = importlib.import_module(f"{PACKAGE}.jax.permutation")
        grouped_dense = importlib.import_module(f"{PACKAGE}.jax.dense").grouped_dense
        if problem.mesh.size > 1:
            raise NotImplementedError(
                f"{PACKAGE}: its layer for several GPUs includes the router; this benchmark cannot "
                "give it its own routes"
            )
        layer = make_layer(permutation, grouped_dense)
        return start_layer(layer, case, problem, None, check_vma=False)


def make_layer(permutation: Any, grouped_dense: baselines.GroupedMatmul) -> baselines.Layer:
    """Returns a function of one rank's x, ids, weights, w_up and w_down."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_down: Any) -> jax.Array:
        tokens = jnp.arange(x.shape[0])[:, None]
        by_expert = jnp.zeros((x.shape[0], w_up.shape[0]), jnp.float32)
        routing_map = by_expert.astype(jnp.int32).at[tokens, ids].set(1)
        rows, _, row_ids, _, sizes = permutation.token_dispatch(x, routing_map, ids.size)
        y = baselines.mlp(grouped_dense, rows, sizes, w_up, w_down)
        weights = by_expert.at[tokens, ids].set(weights)
        return permutation.token_combine(y, row_ids, weights).astype(x.dtype)

    return layer
