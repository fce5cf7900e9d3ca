"""Calling a layer's router: by name, a function, or a pytree of arrays such as an nnx module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._src.core import checks
from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.layer.split import SplitFunction
from jax_ep._src.routing.routers import Routing, sigmoid_topk, softmax_topk

LAYER = "MoE"
"""The layer's name in messages."""

Router = Callable[..., Routing]
NAMED_ROUTERS: dict[str, Router] = {
    "softmax": softmax_topk,
    "sigmoid": sigmoid_topk,
}


class SplitRouter(SplitFunction):
    """A router as its arrays and the rest."""

    def __init__(self, router: Router):
        super().__init__(router)
        self.takes_indices = takes(router, "token_indices")


def call_split(
    split: SplitRouter,
    arrays: list[Any],
    logits: jax.Array,
    top_k: int,
    selection_bias: jax.Array | None,
    token_indices: jax.Array,
    topk_ids: jax.Array | None,
) -> Routing:
    """Calls a router on the tokens of a rank, with keys that are the rank's own.

    Ranks that have the same tokens have the same keys. A router that takes `token_indices` gets
    its keys as they are, and makes keys of tokens.
    """
    router: Router
    if split.takes_indices:
        router = functools.partial(split.merge(arrays), token_indices=token_indices)
    else:
        first = token_indices[0] if token_indices.size else 0
        router = split.merge([_fold_in(a, first) if _is_key(a) else a for a in arrays])
    return call(router, logits, top_k, selection_bias, topk_ids)


def takes(router: Router, argument: str) -> bool:
    """Whether a router has an argument of this name."""
    try:
        return argument in inspect.signature(getattr(router, "router", router)).parameters
    except (TypeError, ValueError):
        return False


def check_replay(router: Router | None) -> None:
    """Raises unless the router can weigh experts that it did not select."""
    if router is not None and not takes(router, "topk_ids"):
        name = getattr(router, "__name__", type(getattr(router, "router", router)).__name__)
        raise ArgumentError(
            f"jax_ep.{LAYER}: topk_ids is given to a layer whose router {name} has no argument "
            "topk_ids; expected one, as softmax_topk and sigmoid_topk have, for experts that it "
            "weighs instead of selecting. Add it, and pass it on to them."
        )


def _is_key(array: Any) -> bool:
    """Whether an array holds keys of `jax.random`, of the new kind or of the old one."""
    is_old = array.dtype == jnp.uint32 and array.shape[-1:] == (2,)
    return is_old or jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _fold_in(keys: jax.Array, data: Any) -> jax.Array:
    is_new = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    fold_in = functools.partial(jax.random.fold_in, data=data)
    for _ in range(keys.ndim - (0 if is_new else 1)):
        fold_in = jax.vmap(fold_in)
    return fold_in(keys)


def call(
    router: Router,
    logits: jax.Array,
    top_k: int,
    selection_bias: jax.Array | None,
    topk_ids: jax.Array | None,
) -> Routing:
    """Calls the router, and checks that it returned a routing of these tokens without side effects.

    A router that changes its own state would do so inside `shard_map`, where the change is lost.
    """
    before = jax.tree.leaves(router)
    options = {"bias": selection_bias, "topk_ids": topk_ids}
    options = {name: array for name, array in options.items() if array is not None}
    routed = router(logits, top_k, **options)
    check_unchanged(router, before, jax.tree.leaves(router))
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


def check_unchanged(router: Router, before: list[Any], after: list[Any]) -> None:
    """Raises if a router's state is not what it was before the call."""
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise ArgumentError(
            f"jax_ep.{LAYER}: the router {type(router).__name__} changed its own state when it was "
            "called; expected a call without side effects. Update the state between calls, e.g. "
            "from MoEStats.expert_load."
        )
