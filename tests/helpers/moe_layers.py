"""moe_mlp on all ranks, its parameters, and the dense layer that it is compared with."""

from __future__ import annotations

import dataclasses
import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import numpy_moe
from testing import Sizes

import jax_ep

MOST = testing.NUM_DEVICES
HIDDEN, INTERMEDIATE = 8, 6
SIZES = Sizes(MOST, num_local=2, num_tokens=4, top_k=3, hidden=HIDDEN)

ACTIVATIONS = {
    "swiglu": lambda h: numpy_moe.silu(h[0]) * h[1],
    "geglu": lambda h: numpy_moe.gelu(h[0]) * h[1],
    "gelu": numpy_moe.gelu,
    "relu": lambda h: np.maximum(h, 0),
    "relu2": lambda h: np.maximum(h, 0) ** 2,
    "silu": numpy_moe.silu,
}
GATED = ("swiglu", "geglu")


@dataclasses.dataclass
class Parameters:
    """The float arguments of moe_mlp, all ranks together; a pytree by `floats`."""

    x: np.ndarray
    topk_weights: np.ndarray | None
    w_up: np.ndarray
    w_down: np.ndarray
    b_up: np.ndarray | None
    b_down: np.ndarray | None

    @property
    def floats(self):
        return dataclasses.astuple(self)


def parameters(
    sizes=SIZES, *, gated=True, biases=True, weights=True, dtype=np.float32, weight_dtype=None
):
    rng = np.random.default_rng(0)
    num_experts, num_tokens = sizes.num_experts, sizes.num_ranks * sizes.num_tokens
    up = (2, INTERMEDIATE) if gated else (INTERMEDIATE,)
    draw = lambda *shape: rng.standard_normal(shape)
    weight_dtype = weight_dtype or dtype
    return Parameters(
        x=draw(num_tokens, HIDDEN).astype(dtype),
        topk_weights=rng.random((num_tokens, sizes.top_k)).astype(np.float32) if weights else None,
        w_up=(draw(num_experts, HIDDEN, *up) / 2).astype(weight_dtype),
        w_down=(draw(num_experts, INTERMEDIATE, HIDDEN) / 2).astype(weight_dtype),
        b_up=draw(num_experts, *up).astype(weight_dtype) if biases else None,
        b_down=draw(num_experts, HIDDEN).astype(weight_dtype) if biases else None,
    )


@functools.cache
def layer(mesh=SIZES.mesh, **options):
    """(ids, *floats) -> (out, stats)."""

    def f(ids, x, topk_weights, w_up, w_down, b_up, b_down):
        return jax_ep.moe_mlp(
            x,
            ids,
            topk_weights,
            w_up,
            w_down,
            b_up=b_up,
            b_down=b_down,
            axis_name="expert",
            **options,
        )

    return testing.sharded(f, mesh)


def numpy_layer(ids, p: Parameters, activation, *, kept=None):
    w_up, w_down = p.w_up.astype(np.float64), p.w_down.astype(np.float64)

    def expert(e, token):
        hidden = np.tensordot(token, w_up[e], 1) + (
            0 if p.b_up is None else p.b_up[e].astype(np.float64)
        )
        out = activation(hidden) @ w_down[e]
        return out + (0 if p.b_down is None else p.b_down[e].astype(np.float64))

    num_ranks = ids.shape[0]
    return numpy_moe.dense_moe(
        p.x.reshape(num_ranks, -1, HIDDEN),
        ids,
        None if p.topk_weights is None else p.topk_weights.reshape(ids.shape),
        expert,
        num_experts=len(w_up),
        kept=kept,
    )


def chunk_plans(ids, num_chunks, *, recv_capacity=None):
    """Every chunk's plans by numpy."""
    tokens = SIZES.num_tokens // num_chunks
    sizes = dataclasses.replace(SIZES, num_tokens=tokens, recv_capacity=recv_capacity)
    return [sizes.plans(ids[:, i : i + tokens]) for i in range(0, SIZES.num_tokens, tokens)]


def kept_of(plans):
    return np.stack([plan.kept for plan in plans])


def assert_stats(stats, chunks, message=""):
    """The counts of all chunks' plans, summed."""
    arrays = [numpy_moe.stack(plans) for plans in chunks]
    for field in dataclasses.fields(stats):
        name = "real_group_sizes" if field.name == "expert_rows" else field.name
        expected = np.sum([plan[name] for plan in arrays], 0, dtype=np.int32)
        testing.assert_bitwise(getattr(stats, field.name), expected, f"{message} {field.name}")


def jax_layer(ids, kept, x, topk_weights, w_up, w_down, b_up, b_down):
    """swiglu, every token through all its kept experts, in float32: for automatic gradients."""
    out = 0.0
    for k in range(ids.shape[1]):
        e = jnp.clip(ids[:, k], 0, len(w_up) - 1)
        h = jnp.einsum("th,thcf->tcf", x, w_up[e], precision="highest")
        h = h if b_up is None else h + b_up[e]
        y = jnp.einsum("tf,tfh->th", jax.nn.silu(h[:, 0]) * h[:, 1], w_down[e], precision="highest")
        y = y if b_down is None else y + b_down[e]
        out += (
            jnp.where(
                kept[:, k : k + 1], 1 if topk_weights is None else topk_weights[:, k : k + 1], 0
            )
            * y
        )
    return out
