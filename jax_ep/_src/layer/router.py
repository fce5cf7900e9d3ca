"""Calling a layer's router: by name, a function, or a pytree of arrays such as an nnx module."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.routing.routers import Routing, sigmoid_topk, softmax_topk

LAYER = "MoE"
"""The layer's name in messages."""

Router = Callable[..., Routing]
NAMED_ROUTERS: dict[str, Router] = {
    "softmax": softmax_topk,
    "sigmoid": sigmoid_topk,
}


class SplitRouter:
    """A router as its arrays, which a `shard_map` must take as arguments, and the rest."""

    def __init__(self, router: Router):
        leaves, self._structure = jax.tree.flatten(router)
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        self._others = [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)]
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def merge(self, arrays: list[jax.Array]) -> Router:
        """The router with these arrays in the place of its own."""
        of_kind = {True: iter(arrays), False: iter(self._others)}
        return jax.tree.unflatten(self._structure, [next(of_kind[a]) for a in self._is_array])


def call(
    router: Router, logits: jax.Array, top_k: int, selection_bias: jax.Array | None
) -> Routing:
    """Calls the router, and checks that it returned a routing of these tokens without side effects.

    A router that changes its own state would do so inside `shard_map`, where the change is lost.
    """
    before = jax.tree.leaves(router)
    options = {} if selection_bias is None else {"bias": selection_bias}
    routed = router(logits, top_k, **options)
    after = jax.tree.leaves(router)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise ArgumentError(
            f"jax_ep.{LAYER}: the router {type(router).__name__} changed its own state when it was "
            "called; expected a call without side effects. Update the state between calls, e.g. "
            "from MoEStats.expert_load."
        )
    if not isinstance(routed, Routing):
        raise DtypeError(
            f"jax_ep.{LAYER}: the router returned a {type(routed).__name__}; expected a "
            "jax_ep.routing.Routing(topk_ids, topk_weights, probabilities)."
        )
    num_tokens, num_experts = logits.shape
    checks.topk_ids(LAYER, routed.topk_ids, num_tokens)
    top_k = routed.topk_ids.shape[1]
    for name, size in ("topk_weights", top_k), ("probabilities", num_experts):
        checks.weights(LAYER, name, getattr(routed, name), (num_tokens, size))
    return routed
