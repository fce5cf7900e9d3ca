"""A model of a few layers in a scan, whose weights are stacks of layers."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep

NUM_LAYERS, T, H, F = 3, 4, 8, 8
SMALL, LARGE = testing.two_axes()
NUM_LOCAL = 2


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scanned(form, **options):
    """Layers of one rank's x, ids, weights, w_up and w_down, by slices, by an index, or in a chain."""
    moe_mlp = functools.partial(jax_ep.moe_mlp, axis_name="expert", **options)

    def layers(x, ids, weights, w_up, w_down):
        masters = w_up, w_down
        w_up, w_down = (w.astype(x.dtype) for w in masters)

        def sliced(x, matrices):
            return x + moe_mlp(x, ids, weights, *matrices)[0], None

        def indexed(x, layer):
            return x + moe_mlp(x, ids, weights, w_up, w_down, layer=layer)[0], None

        def chained(carry, layer):
            x, sums = carry
            y, _, sums = moe_mlp(x, ids, weights, w_up, w_down, layer=layer, accumulators=sums)
            return (x + y, sums), None

        if form == "sliced":
            return jax.lax.scan(sliced, x, (w_up, w_down))[0]
        if form == "indexed":
            return jax.lax.scan(indexed, x, jnp.arange(NUM_LAYERS))[0]
        sums = jax_ep.accumulators(*masters, like=x)
        block = jax.checkpoint(chained) if form == "checkpointed" else chained
        return jax.lax.scan(block, (x, sums), jnp.arange(NUM_LAYERS))[0][0]

    tokens, matrices = P(("data", "expert")), P(None, "expert")
    mesh = testing.mesh_of((SMALL, LARGE), ("data", "expert"))
    return jax.shard_map(
        layers, mesh=mesh, in_specs=(tokens,) * 3 + (matrices,) * 2, out_specs=tokens
    )


def gradients(f):
    """A function of the same arguments: f's result, and the gradients of x and of the matrices."""

    def loss(x, ids, weights, w_up, w_down):
        y = f(x, ids, weights, w_up, w_down)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    def both(*arguments):
        found, y = jax.grad(loss, argnums=(0, 3, 4), has_aux=True)(*arguments)
        return y, found

    return both


def arguments():
    tokens = T * testing.NUM_DEVICES
    ids = np.random.default_rng(0).integers(0, NUM_LOCAL * LARGE, (tokens, 2)).astype(np.int32)
    w_up = normal(NUM_LAYERS, NUM_LOCAL * LARGE, H, 2, F) / 3
    w_down = normal(NUM_LAYERS, NUM_LOCAL * LARGE, F, H, seed=1) / 3
    # They add up to 1, as a router's do. Larger ones make outputs of some hundred, and the loss's sin multiplies the
    # rounding of its argument by that.
    weights = np.abs(normal(tokens, 2))
    return normal(tokens, H), ids, weights / weights.sum(-1, keepdims=True), w_up, w_down


def function(gate, up):
    return jax.nn.silu(gate) * up
